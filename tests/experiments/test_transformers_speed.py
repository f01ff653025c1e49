def test_both_give_the_same_tokens_at_a_speed_of_their_own(tiny_run):
    rows = tiny_run("transformers_speed").rows
    assert rows["same_tokens"].all()
    assert rows.groupby(["phase", "system"]).size().to_dict() == {
        (phase, system): 1
        for phase in ("prefill", "decode")
        for system in ("pagelab", "transformers")
    }
    assert (rows["lowest_tokens_per_s"] <= rows["tokens_per_s"]).all()
    assert (rows["tokens_per_s"] <= rows["highest_tokens_per_s"]).all()
    assert rows["tokens_per_s"].nunique() == 4
