def test_caches_change_what_is_computed_and_no_answer(tiny_run):
    run = tiny_run("chat_story")
    rows = run.rows.set_index(["manager", "block_size", "turn"])
    assert len(rows) == 3 * 3  # paged has no prefix caching: the first block size only
    assert (rows.groupby("turn")[["answers", "prompt_tokens"]].nunique() == 1).all(axis=None)
    computed = rows["computed_tokens"]
    assert computed["paged"].tolist() == rows["prompt_tokens"]["paged"].tolist()
    cells = ("vllm_v1", 4), ("vllm_v1", 32), ("paged", 4)
    fine, coarse, without = (computed[cell].to_numpy() for cell in cells)
    assert (fine <= coarse).all()
    assert fine.sum() < coarse.sum()
    assert (coarse[1:] < without[1:]).all()
    assert run.summary["computed_tokens"].sum() == computed.sum()
