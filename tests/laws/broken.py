"""Which law must reject which deliberately wrong compressor, collective or exchange.

Each specimen differs from a sound one in the one thing its docstring names;
``SOUND_EXCHANGES`` are made of the same parts, and every law must accept them.
"""

from __future__ import annotations

import torch

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.allreduce import allreduce
from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.contract.collective import Collective
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws import ahead as on_ahead
from gradwire_lab.laws import collectives as on_collectives
from gradwire_lab.laws import compressors as on_compressors
from gradwire_lab.laws import exchanges as on_exchanges
from gradwire_lab.laws import many_steps as on_many_steps
from gradwire_lab.laws import payloads as on_payloads
from gradwire_lab.laws import skipped as on_skipped
from tests.laws import broken_collectives as collectives
from tests.laws import broken_compressors as compressors
from tests.laws import broken_exchanges as exchanges
from tests.laws import broken_sums as sums
from tests.laws import broken_support as supports
from tests.laws import broken_variable as sizes
from tests.laws import variable


def _with(collective: Collective, codec: Compressor | None = None) -> Pair:
    return Pair(codec if codec is not None else none(), collective)


SOUND_EXCHANGES = (
    _with(collectives.gathers()),
    _with(collectives.gathers(), onebit()),
    exchanges.altered(),
    _with(collectives.gathers(), qsgd()),
    _with(casync_ps(), qsgd()),
    _with(allgather_sparse(), variable.above()),
    _with(casync_ps(), variable.above()),
    _with(casync_ps(), variable.trimmed()),
    _with(casync_ring(), variable.above()),
    _with(casync_ring(), variable.trimmed()),
)

STARVES = _with(allgather_sparse(), compressors.starves(density=0.5))

GROWS = pair(compressors.stretches_sums(), casync_ring())

SOUND_COMPRESSORS = variable.SOUND

COMPRESSOR_BITES = (
    (
        on_payloads.law_round_trip_keeps_shape_and_dtype,
        compressors.returns_another_tensor(),
    ),
    (on_payloads.law_stated_bytes_are_real, compressors.understates()),
    (on_payloads.law_size_only_payload_agrees, compressors.understates()),
    (on_payloads.law_same_input_same_bits, compressors.depends_on_the_call()),
    (on_payloads.law_given_buffer_is_used, compressors.ignores_buffer()),
    (on_payloads.law_given_buffer_is_used, compressors.relies_on_zeros()),
    (on_payloads.law_stated_bytes_are_real, sizes.states_half(threshold=0.1)),
    (on_payloads.law_given_buffer_is_used, sizes.writes_to_the_back()),
    (on_payloads.law_received_bytes_are_the_payload, sizes.reads_the_largest()),
    (on_payloads.law_received_bytes_are_the_payload, sizes.reads_any_size()),
    (on_payloads.law_typical_payload_is_one, sizes.expects_more_than_there_is()),
    (on_payloads.law_rank_changes_no_meaning, compressors.decodes_by_rank()),
    (on_payloads.law_many_are_as_each_alone, compressors.forgets_residuals_of_many()),
    (on_payloads.law_many_are_as_each_alone, compressors.scales_many_alike()),
    (on_payloads.law_many_are_as_each_alone, compressors.keeps_states_of_many()),
    (on_payloads.law_many_are_as_each_alone, compressors.decodes_many_unscaled()),
    (on_payloads.law_many_are_as_each_alone, compressors.merges_many_into_zeros()),
    (on_payloads.law_input_untouched, compressors.writes_its_input()),
    (on_payloads.law_payload_untouched_by_decode, compressors.decodes_in_place()),
    (on_compressors.law_residual_holds_what_is_missing, compressors.swapped_means()),
    (
        on_compressors.law_residual_holds_what_is_missing,
        compressors.loses_first_element(density=0.3),
    ),
    (
        on_compressors.law_residual_holds_what_is_missing,
        compressors.drops_ties(density=0.3),
    ),
    (on_compressors.law_residual_holds_what_is_missing, compressors.doubles_residual()),
    (on_compressors.law_residual_holds_what_is_missing, compressors.amplifies()),
    (on_compressors.law_residual_form_encodes_the_sum, compressors.delays_residual()),
    (on_compressors.law_residual_form_encodes_the_sum, compressors.doubles_residual()),
    (on_compressors.law_residual_stays_finite, compressors.absorbs_nan()),
    (on_compressors.law_non_finite_is_visible, compressors.hides_nan(density=1.0)),
    (
        on_compressors.law_non_finite_is_visible_with_residual,
        compressors.hides_nan_with_residual(),
    ),
    (on_compressors.law_lossless_means_bit_equal, compressors.claims_lossless()),
    (on_compressors.law_nonexpansive, compressors.swapped_means()),
    (on_compressors.law_nonexpansive, compressors.amplifies()),
    (on_compressors.law_unbiased, compressors.rounds_down()),
    (on_compressors.law_unbiased, compressors.loses_tiny_blocks()),
    (on_compressors.law_unbiased, compressors.hides_its_range()),
    (on_compressors.law_unbiased, compressors.draws_once(bitwidth=2)),
    (on_compressors.law_unbiased, compressors.hides_its_clipping(clip=2.5)),
    (on_compressors.law_merge_adds_the_decoded, compressors.merges_unscaled()),
    (on_compressors.law_merge_all_is_merge_of_each, compressors.merges_all_but_one()),
    (on_compressors.law_decode_scales, compressors.decodes_unscaled()),
    (on_compressors.law_decode_overwrites, compressors.adds_on_decode()),
    (on_compressors.law_additive_payloads_may_be_summed, compressors.square_roots()),
    (
        on_compressors.law_sum_over_ranks_cannot_overflow,
        compressors.never_prescales(dtype=torch.float16),
    ),
    (on_compressors.law_settings_are_frozen_values, compressors.thawed()),
)

COLLECTIVE_BITES = (
    (on_collectives.law_never_deadlocks, _with(collectives.sends_before_it_receives())),
    (
        on_collectives.law_verbs_do_not_depend_on_values,
        supports.allocates_alone(density=0.3),
    ),
    (on_collectives.law_same_bits_on_every_rank, supports.draws_apart(density=0.3)),
    (on_collectives.law_same_bits_on_every_rank, sums.decides_alone(density=0.3)),
    (on_collectives.law_equals_the_dense_mean, _with(collectives.forgets_a_rank())),
    (
        on_collectives.law_equals_the_dense_mean,
        _with(allreduce(), compressors.calls_sums_decoded()),
    ),
    (
        on_collectives.law_same_bits_on_every_rank,
        _with(collectives.starts_with_itself()),
    ),
    (
        on_collectives.law_sends_the_stated_bytes,
        _with(collectives.gathers_again(), onebit()),
    ),
    (
        on_collectives.law_sends_the_stated_bytes,
        _with(allgather_sparse(), sizes.claims_one_size(threshold=-1.0)),
    ),
    (
        on_collectives.law_verbs_do_not_depend_on_values,
        _with(sizes.spares_empty_payloads(), variable.above()),
    ),
    (
        on_collectives.law_any_interleaving_same_bits,
        _with(collectives.first_come_first_summed()),
    ),
    (
        on_collectives.law_verbs_do_not_depend_on_values,
        _with(collectives.announces_zeros()),
    ),
    (
        on_collectives.law_mean_may_overwrite_the_gradient,
        _with(collectives.clears_out_first()),
    ),
    (
        on_collectives.law_used_buffers_change_nothing,
        _with(collectives.trusts_old_buffers()),
    ),
    (
        on_collectives.law_used_buffers_change_nothing,
        _with(collectives.asks_for_its_payload_again()),
    ),
    (on_collectives.law_gradient_untouched, _with(collectives.scales_the_gradient())),
    (
        on_collectives.law_sums_do_not_overflow,
        _with(collectives.sums_in_the_gradients_dtype()),
    ),
)

EXCHANGE_BITES = (
    (
        on_exchanges.law_whole_numbers_of_the_state_are_shared,
        exchanges.counts_its_own(),
    ),
    (
        on_exchanges.law_whole_numbers_of_the_state_are_shared,
        exchanges.decides_by_its_own(),
    ),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        _with(collectives.hides_aggregator_loss(), onebit()),
    ),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        _with(collectives.forgets_a_rank(), topk(density=0.3)),
    ),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        _with(collectives.forgets_what_hops_drop(), topk(density=0.3)),
    ),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        _with(collectives.forgets_what_hops_drop(), dgc(density=0.3)),
    ),
    (on_exchanges.law_nothing_is_lost_or_made, exchanges.leaves_residual_stale()),
    (on_exchanges.law_nothing_is_lost_or_made, supports.loses_an_index(density=0.3)),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        supports.sends_common_twice(density=1.0),
    ),
    (on_exchanges.law_nothing_is_lost_or_made, sums.keeps_only_its_own(density=0.3)),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        sums.forgets_what_was_too_small(density=0.3),
    ),
    (on_exchanges.law_nothing_is_lost_or_made, exchanges.drops_residual()),
    (
        on_exchanges.law_nothing_is_lost_or_made,
        _with(collectives.gathers(), compressors.doubles_residual()),
    ),
    (on_exchanges.law_contributions_make_the_mean, exchanges.claims_all_arrived()),
    (
        on_exchanges.law_contributions_make_the_mean,
        _with(collectives.hides_aggregator_loss(), onebit()),
    ),
    (on_exchanges.law_contributed_is_what_left_the_residual, exchanges.hoards()),
    (on_exchanges.law_kept_buffers_change_no_bit, exchanges.reads_old_buffers()),
    (
        on_exchanges.law_fused_form_agrees_with_the_definition,
        exchanges.only_adds_to_residual(),
    ),
    (
        on_exchanges.law_an_undone_step_leaves_no_trace,
        exchanges.keeps_beside_its_state(),
    ),
    (on_skipped.law_what_is_not_taken_is_put_back, exchanges.keeps_beside_its_state()),
    (on_exchanges.law_callers_tensors_untouched, exchanges.writes_the_gradient()),
    (
        on_exchanges.law_repeatable_under_any_interleaving,
        _with(collectives.first_come_first_summed()),
    ),
    (
        on_exchanges.law_non_finite_reaches_all_and_does_not_stay,
        _with(collectives.gathers(), compressors.hides_nan_with_residual()),
    ),
    (
        on_exchanges.law_non_finite_reaches_all_and_does_not_stay,
        _with(collectives.gathers(), compressors.absorbs_nan()),
    ),
    (
        on_exchanges.law_residual_finite_for_huge_gradients,
        exchanges.overflows_residual(),
    ),
    (on_exchanges.law_no_tensor_is_missing, exchanges.selects_from_the_whole()),
    (
        on_many_steps.law_ranks_draw_apart,
        _with(collectives.gathers(), compressors.draws_alike()),
    ),
    (on_many_steps.law_ranks_draw_apart, _with(casync_ps(), compressors.draws_alike())),
    (
        on_many_steps.law_unbiased_codecs_make_unbiased_means,
        _with(casync_ps(), compressors.draws_alike(norm="l2")),
    ),
    (
        on_exchanges.law_tensors_are_encoded_apart,
        exchanges.shares_blocks(onebit(), casync_ps()),
    ),
    (
        on_many_steps.law_what_is_kept_does_not_grow_by_itself,
        _with(collectives.encodes_its_own_chunk(), threelc(sparsity=1.75, block=64)),
    ),
    (
        on_many_steps.law_what_is_kept_does_not_grow_by_itself,
        _with(casync_ps(), compressors.claims_nonexpansive(bitwidth=2, norm="l2")),
    ),
    (on_exchanges.law_alone_is_plain_training, exchanges.rounds_alone()),
    (on_ahead.law_encoding_ahead_changes_no_bit, exchanges.encodes_twice()),
    (on_ahead.law_encoding_ahead_changes_no_bit, exchanges.encodes_what_is_not_there()),
    (on_ahead.law_encoding_on_the_host_changes_no_bit, exchanges.keeps_what_it_sent()),
)
