"""The heap with lazy deletion against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.policies.lazy_heap import LazyHeap

OPERATIONS = st.tuples(
    st.sampled_from(["push", "pop", "remove"]), st.integers(0, 5), st.integers(0, 3)
)


@given(st.lists(OPERATIONS, max_size=60))
def test_a_heap_equals_a_list_sorted_by_priority_and_arrival(operations):
    heap, model = LazyHeap(), []
    for now, (operation, item, priority) in enumerate(operations):
        held = [other for _, _, other in model]
        if operation == "pop":
            if model:
                first = min(model)
                model.remove(first)
                assert heap.pop() == (first[0], first[2])
            else:
                with pytest.raises(IndexError):
                    heap.pop()
        elif operation == "remove":
            if item in held:
                heap.remove(item)
                del model[held.index(item)]
            else:
                with pytest.raises(KeyError):
                    heap.remove(item)
        elif item in held:
            with pytest.raises(ValueError, match=f"push: {item} is here already"):
                heap.push(item, priority)
        else:
            heap.push(item, priority)
            model.append((priority, now, item))
        assert list(heap) == [other for _, _, other in sorted(model)]
        assert len(heap) == len(model)
        assert [other in heap for other in range(6)] == [
            any(other == item for _, _, item in model) for other in range(6)
        ]


def test_stale_entries_are_dropped():
    heap = LazyHeap()
    heap.push("stays", 1)
    for _ in range(1000):
        heap.push("goes", 0)
        heap.remove("goes")
    assert len(heap._heap) <= 2 + 64
    assert list(heap) == ["stays"]
