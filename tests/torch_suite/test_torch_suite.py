"""A part of PyTorch's own tests of process groups, chosen to take half a minute; `make torch-suite` runs them all.

Of each verb and form one test at least, and the ones that exercise most of a backend: groups, asynchronous calls,
objects, profilers, deadlines, torch's DDP. The table in `results.md` says what must pass.
"""

from __future__ import annotations

import pytest

import run

SUBSET = {
    run.SECTIONS[0].title: """
        test_Backend_enum_class test_get_backend test_get_rank test_get_future test_destroy_full_group
        test_broadcast test_all_reduce_sum test_all_reduce_product test_all_reduce_sum_async
        test_all_reduce_sum_complex test_all_reduce_complex_unsupported_ops test_all_reduce_coalesced_max
        test_all_reduce_coalesced_full_group_sum test_sparse_all_reduce_sum test_reduce_min test_reduce_sum_twice
        test_all_gather test_all_gather_complex test_all_gather_coalesced_with_empty test_gather test_gather_checks
        test_scatter test_scatter_checks test_scatter_complex test_isend test_irecv test_send_recv
        test_send_recv_any_source test_send_recv_with_tag_torch_profiler test_batch_isend_irecv_gloo_tags
        test_barrier_full_group test_barrier_timeout_global test_monitored_barrier_gloo_subgroup
        test_all_gather_object_subgroup test_scatter_object_list
        test_DistributedDataParallelCPU_grad_is_view test_ddp_logging_data_cpu test_static_graph_api_cpu
        test_accumulate_gradients_no_sync_allreduce_with_then_hook
    """,
    run.SECTIONS[1].title: "test_gather_object_subgroup test_new_subgroups_with_group_param",
    run.SECTIONS[2].title: """
        test_all_reduce_group_sum test_all_gather_group test_reduce_group_max test_barrier_group
        test_monitored_barrier_failure_order test_monitored_barrier_wait_all_ranks
    """,
    run.SECTIONS[3].title: """
        test_all_to_all test_all_to_all_complex test_all_to_all_single_unequal_split
        test_all_to_all_single_equal_split_full_group
    """,
}
SHORTEST = run.SECTIONS[1]


@pytest.mark.parametrize(
    "section",
    [pytest.param(one, id=one.title, marks=[pytest.mark.core] if one is SHORTEST else []) for one in run.SECTIONS],
)
def test_subset(section: run.Section) -> None:
    wrong = run.check_section(section, SUBSET[section.title].split())
    assert not wrong, "\n".join(f"{one.status}: {one.name}\n{one.detail}" for one in wrong)


def test_rule_holds_in_the_table() -> None:
    rows = run.read_table()
    assert [key for key, row in rows.items() if row.must_pass and row.ours != "passed"] == []
    assert sum(row.ours == "passed" for row in rows.values()) > 100
