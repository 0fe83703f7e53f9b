"""All laws, as a table. `laws.py` judges them.

Codes of the public table of faults: WORLD_MOD_MP WORLD_SIZE_MISMATCH WORLD_MOD_EP EXPERTS_MOD_EP HEADS_MOD_TP KV_HEADS_MOD_TP
KV_HEADS_MOD_ULYSSES VOCAB_MOD_TP LAYERS_MOD_PP LAYERS_MOD_PPVPP TIED_EMB_PP_SYNC SEQ_MOD_TPCP GBS_MOD_MBSDP
BATCH_MOD_MICROBATCHES MICROBATCHES_LT_PP MICROBATCHES_MOD_PP ZERO23_WITH_PP RECOMPUTE_WITH_SPLIT_BACKWARD TP_SPANS_NODES
MEM_STATES_GT_HBM MEM_BORDERLINE HOST_MEM.

Further laws, which hold for every framework: DP_MOD_SHARD (dp = dp_replicate·dp_shard), BATCH_MISMATCH (gbs =
dp·mbs·microbatches), STAGES_GT_BLOCKS (each virtual stage holds a block). Further laws of particular runtimes, silent where
nobody has read the framework: KV_REPLICAS_MOD_TP (copied heads come out whole), FFN_MOD_TP, MOE_FFN_MOD_ETP,
HEADS_MOD_ULYSSES, MICROBATCHES_MOD_ROUNDS (torch's interleaved schedule), SCHEDULE_VPP (virtual stages that the schedule
needs), VPP_NEEDS_PP, ZB_WITH_SHARDING (silently wrong gradients), GATHER_WITH_ZERO, ZERO_UNSUPPORTED, CP_UNSUPPORTED,
EP_UNSUPPORTED, SCHEDULE_UNSUPPORTED, RECOMPUTE_UNKNOWN, RECOMPUTE_WITHOUT_PART, PRECISION_UNSUPPORTED.
"""

import math

from cost_models.facts import Law
from cost_models.law_terms import (
    MARGIN,
    PP_LAWS,
    TP_LAWS,
    divides,
    divisors,
    edp,
    gib,
    is_one,
    legal_gathers,
    looped,
    memory_more,
    memory_offer,
    micro_batches_needed,
    nearest_multiples,
    not_divisible,
    num,
    offer,
    parts_without,
    product,
    schedule_fits_vpp,
    seq_multiple,
    states_fit,
    tp_offer,
    uneven_kv_heads,
    uneven_offer,
    vocab_step,
    where,
)
from cost_models.records import SPLIT_BACKWARD, Precision, Schedule, Severity

_NARROW = [precision.value for precision in Precision if precision.is_narrow]
"""Formats that no device without them stands in for; 16 bits are widened where they must (`compute.WIDENED`)."""

LAWS: tuple[Law, ...] = (
    Law(
        code="WORLD_MOD_MP",
        statement="world % (tp·pp·cp) = 0",
        operands=("world", "tp", "pp", "cp"),
        predicate=lambda f, r: num(f.world) % product(f, "tp", "pp", "cp") == 0,
        says=lambda f, r: (
            f"world={f.world} is not divisible by tp·pp·cp = {f.tp}·{f.pp}·{f.cp} = {product(f, 'tp', 'pp', 'cp')}"
        ),
        legal_keys=("tp", "pp", "cp"),
        legal_more=lambda f, r: {"tp·pp·cp": divisors(num(f.world))},
        offer=offer("take degrees whose product divides the number of GPUs, or another number of GPUs"),
    ),
    Law(
        code="WORLD_SIZE_MISMATCH",
        statement="tp·pp·cp·dp = world",
        operands=("world", "tp", "pp", "cp", "dp"),
        predicate=lambda f, r: num(f.world) % (mp := product(f, "tp", "pp", "cp")) != 0 or mp * num(f.dp) == f.world,
        says=lambda f, r: (
            f"tp·pp·cp·dp = {f.tp}·{f.pp}·{f.cp}·{f.dp} = {product(f, 'tp', 'pp', 'cp', 'dp')}, but world={f.world}"
        ),
        legal_keys=("dp",),
        offer=offer("take the dp that fits (ep is never a factor of the world)"),
    ),
    Law(
        code="DP_MOD_SHARD",
        statement="dp % dp_shard = 0",
        operands=("dp", "dp_shard"),
        predicate=divides("dp", "dp_shard"),
        void=lambda f: f.dp_shard in (None, 1),
        says=not_divisible("dp", "dp_shard"),
        legal_keys=("dp_shard",),
        offer=offer("dp is dp_replicate·dp_shard: take a dp_shard that divides it"),
    ),
    Law(
        code="WORLD_MOD_EP",
        statement="(dp·cp·tp) % (ep·etp) = 0",
        operands=("dp", "cp", "tp", "ep"),
        optional=("etp",),
        predicate=lambda f, r: (pair := edp(f))[0] % pair[1] == 0,
        void=lambda f: f.ep == 1 and f.etp in (None, 1),
        says=lambda f, r: (
            f"dp·cp·tp = {f.dp}·{f.cp}·{f.tp} = {edp(f)[0]} is not divisible by ep·etp = {f.ep}·{f.etp or 1} = {edp(f)[1]}"
        ),
        legal_keys=("ep",),
        legal_with=("EXPERTS_MOD_EP",),
        offer=lambda f, r: (
            "experts live on the ranks of dp, cp and tp: take an ep that divides these"
            + (", or a smaller etp" if num(f.etp or 1) > 1 else "")
        ),
    ),
    Law(
        code="EXPERTS_MOD_EP",
        statement="num_experts % ep = 0",
        operands=("num_experts", "ep"),
        predicate=lambda f, r: num(f.num_experts) > 0 and num(f.num_experts) % num(f.ep) == 0,
        void=is_one("ep"),
        says=lambda f, r: (
            not_divisible("num_experts", "ep")(f, r) if f.num_experts else f"ep={f.ep}, but the model has no experts"
        ),
        legal_keys=("ep",),
        legal_with=("WORLD_MOD_EP",),
        offer=lambda f, r: "take an ep that divides the experts and the ranks" if f.num_experts else "take ep=1",
    ),
    Law(
        code="HEADS_MOD_TP",
        statement="heads % tp = 0",
        operands=("heads", "tp"),
        predicate=divides("heads", "tp"),
        void=is_one("tp"),
        says=not_divisible("heads", "tp"),
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        offer=lambda f, r: tp_offer(f, r),
    ),
    Law(
        code="KV_HEADS_MOD_TP",
        statement="kv_heads % tp = 0, unless the runtime copies heads",
        operands=("kv_heads", "tp"),
        predicate=divides("kv_heads", "tp"),
        void=is_one("tp"),
        says=not_divisible("kv_heads", "tp"),
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        offer=offer("take a legal tp; copied key and value heads cost their weights, gradients and memory again"),
    ),
    Law(
        code="KV_REPLICAS_MOD_TP",
        statement="kv_heads % tp = 0 or tp % kv_heads = 0",
        operands=("kv_heads", "tp"),
        predicate=lambda f, r: not uneven_kv_heads(f),
        void=is_one("tp"),
        severity=Severity.NONE,
        says=lambda f, r: f"kv_heads={uneven_kv_heads(f)[0]} is neither a multiple nor a divisor of tp={f.tp}",
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        offer=offer("heads are copied whole: take a legal tp"),
    ),
    Law(
        code="KV_HEADS_MOD_ULYSSES",
        statement="kv_heads % ulysses = 0, unless the runtime copies heads",
        operands=("kv_heads", "ulysses"),
        predicate=divides("kv_heads", "ulysses"),
        void=lambda f: f.ulysses in (None, 1),
        says=not_divisible("kv_heads", "ulysses"),
        legal_keys=("ulysses",),
        legal_with=("HEADS_MOD_ULYSSES",),
        offer=offer("take ring attention (cp) instead, which does not divide heads"),
    ),
    Law(
        code="HEADS_MOD_ULYSSES",
        statement="heads % (tp·ulysses) = 0",
        operands=("heads", "tp", "ulysses"),
        predicate=lambda f, r: num(f.heads) % product(f, "tp", "ulysses") == 0,
        void=lambda f: f.ulysses in (None, 1),
        says=lambda f, r: f"heads={f.heads} is not divisible by tp·ulysses = {f.tp}·{f.ulysses}",
        legal_keys=("ulysses",),
        legal_with=("KV_HEADS_MOD_ULYSSES",),
        offer=offer("take ring attention (cp) instead, which does not divide heads"),
    ),
    Law(
        code="VOCAB_MOD_TP",
        statement="vocab % tp = 0",
        operands=("vocab", "tp"),
        predicate=divides("vocab", "tp"),
        void=is_one("tp"),
        says=not_divisible("vocab", "tp"),
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        legal_more=lambda f, r: {"vocab": [-(-num(f.vocab) // (step := vocab_step(f, r))) * step]},
        offer=lambda f, r: (
            f"or pad the vocabulary to a multiple of {vocab_step(f, r)}, mask the added rows, and record the padded size"
        ),
    ),
    Law(
        code="FFN_MOD_TP",
        statement="ffn % tp = 0",
        operands=("ffn", "tp"),
        predicate=divides("ffn", "tp"),
        void=is_one("tp"),
        says=not_divisible("ffn", "tp"),
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        offer=offer("take a legal tp"),
    ),
    Law(
        code="MOE_FFN_MOD_ETP",
        statement="moe_ffn % etp = 0",
        operands=("moe_ffn", "etp"),
        optional=("num_experts",),
        predicate=divides("moe_ffn", "etp"),
        void=lambda f: f.etp in (None, 1) or f.num_experts == 0,
        says=not_divisible("moe_ffn", "etp"),
        legal_keys=("etp",),
        offer=offer("take etp=1, or one that divides the experts' width"),
    ),
    Law(
        code="LAYERS_MOD_PP",
        statement="num_layers % pp = 0",
        operands=("num_layers", "pp"),
        predicate=divides("num_layers", "pp"),
        void=is_one("pp"),
        severity=Severity.WARNING,
        says=not_divisible("num_layers", "pp"),
        legal_keys=("pp",),
        legal_with=PP_LAWS,
        offer=uneven_offer(virtual=False),
    ),
    Law(
        code="LAYERS_MOD_PPVPP",
        statement="num_layers % (pp·vpp) = 0",
        operands=("num_layers", "pp", "vpp"),
        predicate=lambda f, r: num(f.num_layers) % product(f, "pp", "vpp") == 0,
        void=lambda f: f.vpp in (None, 1),
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"num_layers={f.num_layers} is not divisible by pp·vpp = {f.pp}·{f.vpp} = {product(f, 'pp', 'vpp')}"
        ),
        legal_keys=("vpp",),
        offer=uneven_offer(virtual=True),
    ),
    Law(
        code="STAGES_GT_BLOCKS",
        statement="pp·vpp ≤ num_layers + 2",
        operands=("num_layers", "pp", "vpp"),
        predicate=lambda f, r: product(f, "pp", "vpp") <= num(f.num_layers) + 2,
        void=lambda f: f.pp == 1 and f.vpp == 1,
        says=lambda f, r: (
            f"{f.pp}·{f.vpp} virtual stages, but only {num(f.num_layers) + 2} blocks (embedding, {f.num_layers} layers, head)"
        ),
        legal_keys=("pp", "vpp"),
        offer=offer("each virtual stage holds at least one block: take fewer stages"),
    ),
    Law(
        code="TIED_EMB_PP_SYNC",
        statement="with tied embeddings the first and the last stage share weights",
        operands=("tie_embeddings", "pp"),
        predicate=lambda f, r: not (f.tie_embeddings and num(f.pp) > 1),
        void=is_one("pp"),
        severity=Severity.INFO,
        says=lambda f, r: f"tied embeddings with pp={f.pp}: embedding and head lie on different stages",
        legal_more=lambda f, r: {"pp": [1]},
        offer=offer(
            "put both on one stage, or hold a copy on each and all-reduce its gradient every step (vocab·hidden numbers); "
            "after loading weights, copy them to the last stage"
        ),
    ),
    Law(
        code="SEQ_MOD_TPCP",
        statement="seq % (cp·lcm(2, tp)) = 0 with context parallelism; seq % tp = 0 with sequence parallelism",
        operands=("seq", "tp", "cp", "sp"),
        optional=("ulysses",),
        predicate=lambda f, r: num(f.seq) % seq_multiple(f) == 0,
        void=lambda f: (
            (f.cp == 1 and (f.tp == 1 or f.sp is False))
            or (f.sp is None and None not in (f.seq, f.tp, f.cp) and num(f.seq) % seq_multiple(f) == 0)
        ),
        says=lambda f, r: (
            f"seq={f.seq} is not a multiple of {seq_multiple(f)} (tp={f.tp}, cp={f.cp}"
            f"{', sequence parallel' if f.sp else ''})"
        ),
        legal_more=lambda f, r: {"seq": nearest_multiples(num(f.seq), seq_multiple(f))},
        offer=offer("pad or cut every batch, the last one too, to such a length"),
    ),
    Law(
        code="GBS_MOD_MBSDP",
        statement="gbs % (mbs·dp) = 0",
        operands=("gbs", "mbs", "dp"),
        predicate=lambda f, r: num(f.gbs) % product(f, "mbs", "dp") == 0,
        says=lambda f, r: f"gbs={f.gbs} is not divisible by mbs·dp = {f.mbs}·{f.dp} = {product(f, 'mbs', 'dp')}",
        legal_keys=("mbs",),
        legal_more=lambda f, r: {"gbs": nearest_multiples(num(f.gbs), product(f, "mbs", "dp"))},
        offer=offer("take the nearest gbs, or a legal mbs"),
    ),
    Law(
        code="BATCH_MOD_MICROBATCHES",
        statement="gbs % (dp·microbatches) = 0",
        operands=("gbs", "dp", "microbatches"),
        optional=("mbs",),
        predicate=lambda f, r: num(f.gbs) % product(f, "dp", "microbatches") == 0,
        void=lambda f: f.microbatches is None or f.mbs is not None,
        says=lambda f, r: f"gbs={f.gbs} is not divisible by dp·microbatches = {f.dp}·{f.microbatches}",
        legal_keys=("microbatches",),
        offer=offer("take a legal number of micro-batches"),
    ),
    Law(
        code="BATCH_MISMATCH",
        statement="gbs = dp·mbs·microbatches",
        operands=("gbs", "dp", "mbs", "microbatches"),
        predicate=lambda f, r: (
            num(f.gbs) % product(f, "mbs", "dp") != 0 or f.gbs == product(f, "dp", "mbs", "microbatches")
        ),
        void=lambda f: f.microbatches is None or f.mbs is None,
        says=lambda f, r: f"gbs={f.gbs}, but dp·mbs·microbatches = {f.dp}·{f.mbs}·{f.microbatches}",
        legal_keys=("microbatches",),
        offer=offer("gbs stays as it is: take that number of micro-batches, or another mbs"),
    ),
    Law(
        code="MICROBATCHES_LT_PP",
        statement="num_micro_batches ≥ pp, where the schedule needs it",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: num(f.num_micro_batches) >= micro_batches_needed(f),
        void=lambda f: micro_batches_needed(f) == 1 and f.pp is not None,
        says=lambda f, r: (
            f"{f.num_micro_batches} micro-batches of a step are fewer than the {micro_batches_needed(f)} that "
            f"{f.schedule or 'the schedule (1f1b where none is said)'} needs with pp={f.pp}"
        ),
        legal_keys=("pp",),
        legal_with=PP_LAWS,
        legal_more=lambda f, r: {"num_micro_batches": [f"≥ {micro_batches_needed(f)}"]},
        offer=offer("take a smaller mbs or pp, or a larger batch; 4·pp micro-batches keep the bubble below 20%"),
    ),
    Law(
        code="MICROBATCHES_MOD_PP",
        statement="num_micro_batches % pp = 0 with virtual stages",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: num(f.num_micro_batches) % num(f.pp) == 0,
        void=lambda f: not looped(f) or f.pp == 1,
        says=lambda f, r: f"{f.num_micro_batches} micro-batches are not a multiple of pp={f.pp}, with vpp={f.vpp}",
        legal_more=lambda f, r: {"num_micro_batches": nearest_multiples(num(f.num_micro_batches), num(f.pp))},
        offer=offer("take such a number of micro-batches, or vpp=1"),
    ),
    Law(
        code="MICROBATCHES_MOD_ROUNDS",
        statement="num_micro_batches % max(1, num_micro_batches // pp) = 0 with virtual stages",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: num(f.num_micro_batches) % max(1, num(f.num_micro_batches) // num(f.pp)) == 0,
        void=lambda f: not looped(f) or f.pp == 1 or f.schedule is Schedule.LOOPED_BFS,
        severity=Severity.NONE,
        says=lambda f, r: (
            f"{f.num_micro_batches} micro-batches do not make {max(1, num(f.num_micro_batches) // num(f.pp))} equal "
            f"rounds over pp={f.pp}"
        ),
        legal_more=lambda f, r: {"num_micro_batches": nearest_multiples(num(f.num_micro_batches), num(f.pp))},
        offer=offer("take such a number of micro-batches, or vpp=1"),
    ),
    Law(
        code="SCHEDULE_VPP",
        statement="vpp = 1 for gpipe and 1f1b, 2 for zbv, dualpipev, vhalf and vmin, at least 2 for the looped schedules",
        operands=("schedule", "vpp", "pp"),
        predicate=schedule_fits_vpp,
        void=lambda f: f.pp == 1 or f.schedule is None,
        says=lambda f, r: f"schedule={f.schedule} with vpp={f.vpp}",
        legal_keys=("vpp",),
        offer=offer("take that vpp, or another schedule"),
    ),
    Law(
        code="VPP_NEEDS_PP",
        statement="vpp = 1 where pp = 1",
        operands=("vpp", "pp"),
        predicate=lambda f, r: f.vpp == 1 or f.pp != 1,
        void=is_one("vpp"),
        says=lambda f, r: f"vpp={f.vpp} with pp={f.pp}: there is no pipeline to interleave",
        legal_more=lambda f, r: {"vpp": [1]},
        offer=offer("take vpp=1"),
    ),
    Law(
        code="ZERO_UNSUPPORTED",
        statement="zero is a level that the runtime realises",
        operands=("zero",),
        predicate=lambda f, r: r is None or f.zero in r.zero_levels,
        void=lambda f: f.zero == 0,
        says=lambda f, r: f"zero={f.zero} is not what {r.name if r else ''} realises",
        legal_keys=("zero",),
        offer=offer("take one of these levels, or another runtime"),
    ),
    Law(
        code="GATHER_WITH_ZERO",
        statement="gather goes with zero: step (0, 1), micro or step (2, by the runtime), use (3)",
        operands=("gather", "zero"),
        predicate=lambda f, r: f.gather in legal_gathers(f, r),
        says=lambda f, r: f"gather={f.gather} with zero={f.zero}",
        legal_more=lambda f, r: {"gather": legal_gathers(f, r)},
        offer=offer("FSDP with reshard_after_forward=True is 3/use, with False 2/micro; DeepSpeed's stage 2 is 2/step"),
    ),
    Law(
        code="ZERO23_WITH_PP",
        statement="zero ≤ 1 where pp > 1",
        operands=("zero", "pp"),
        predicate=lambda f, r: not (num(f.zero) >= 2 and num(f.pp) > 1),
        void=lambda f: f.pp == 1 or f.zero in (0, 1),
        severity=Severity.WARNING,
        says=lambda f, r: f"zero={f.zero} with pp={f.pp}",
        legal_keys=("zero",),
        offer=offer("take zero=1 (gradients reduced for each micro-batch would multiply the traffic), or pp=1"),
    ),
    Law(
        code="ZB_WITH_SHARDING",
        statement="a schedule that splits the backward takes neither DDP nor FSDP that reshards",
        operands=("schedule", "pp", "zero", "dp"),
        predicate=lambda f, r: f.zero == 2 or (f.zero != 3 and f.dp == 1),
        void=lambda f: f.pp == 1 or f.schedule not in SPLIT_BACKWARD,
        severity=Severity.NONE,
        says=lambda f, r: (
            f"schedule={f.schedule} with zero={f.zero} and dp={f.dp}: correct loss, silently wrong gradients"
        ),
        legal_keys=("schedule",),
        legal_more=lambda f, r: {"zero": [2]},
        offer=offer("take zero=2 (reshard_after_forward=False), dp=1, or a schedule with whole backwards"),
    ),
    Law(
        code="RECOMPUTE_WITH_SPLIT_BACKWARD",
        statement="no recompute where the schedule splits the backward",
        operands=("recompute", "schedule", "pp"),
        predicate=lambda f, r: f.recompute == "none",
        void=lambda f: f.pp == 1 or f.recompute == "none" or f.schedule not in SPLIT_BACKWARD,
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"recompute={f.recompute} with schedule={f.schedule}: the weight gradients keep recomputed inputs alive"
        ),
        legal_keys=("schedule",),
        legal_more=lambda f, r: {"recompute": ["none"]},
        offer=offer("take another schedule, or no recompute"),
    ),
    Law(
        code="CP_UNSUPPORTED",
        statement="cp = 1 where the runtime has no context parallelism",
        operands=("cp",),
        predicate=lambda f, r: r is None or r.context_parallel,
        void=is_one("cp"),
        says=lambda f, r: f"cp={f.cp}, but {r.name if r else ''} has no context parallelism yet",
        legal_more=lambda f, r: {"cp": [1]},
        offer=offer("take cp=1, or another runtime"),
    ),
    Law(
        code="EP_UNSUPPORTED",
        statement="ep = 1 where the runtime has no expert parallelism",
        operands=("ep",),
        predicate=lambda f, r: r is None or r.expert_parallel,
        void=is_one("ep"),
        says=lambda f, r: f"ep={f.ep}, but {r.name if r else ''} has no expert parallelism yet",
        legal_more=lambda f, r: {"ep": [1]},
        offer=offer("take ep=1, or another runtime"),
    ),
    Law(
        code="SCHEDULE_UNSUPPORTED",
        statement="the runtime has the schedule",
        operands=("schedule",),
        predicate=lambda f, r: r is None or f.schedule in r.schedules,
        says=lambda f, r: f"schedule={f.schedule} is not one of {r.name if r else ''}",
        legal_more=lambda f, r: {"schedule": [schedule.value for schedule in r.schedules] if r else []},
        offer=offer("take one of these, or another runtime"),
    ),
    Law(
        code="RECOMPUTE_UNKNOWN",
        statement="the runtime has the kind of recompute",
        operands=("recompute",),
        predicate=lambda f, r: r is None or f.recompute in r.recompute_kinds or f.recompute == "stages",
        void=lambda f: f.recompute is None,
        says=lambda f, r: f"recompute={f.recompute} is not a kind of {r.name if r else ''}",
        legal_more=lambda f, r: {"recompute": list(r.recompute_kinds) if r else []},
        offer=offer("take one of these"),
    ),
    Law(
        code="RECOMPUTE_WITHOUT_PART",
        statement="the model has the part that is recomputed",
        operands=("recompute",),
        optional=("num_experts", "latent_attention"),
        predicate=lambda f, r: not parts_without(f),
        void=lambda f: f.recompute is None,
        says=lambda f, r: f"recompute={f.recompute}, but the model has no {' and no '.join(parts_without(f))}",
        offer=offer("leave that module out"),
    ),
    Law(
        code="PRECISION_UNSUPPORTED",
        statement="the device multiplies in the narrow format",
        operands=("precision",),
        optional=("device_precisions",),
        predicate=lambda f, r: f.device_precisions is None or f.precision in f.device_precisions,
        void=lambda f: f.precision not in _NARROW,
        says=lambda f, r: (
            f"precision={f.precision} is not one of the device, which has {', '.join(f.device_precisions or ())}"
        ),
        legal_more=lambda f, r: {"precision": list(f.device_precisions or ())},
        offer=offer("take one of these, or another device"),
    ),
    Law(
        code="TP_SPANS_NODES",
        statement="tp ≤ the fast domain",
        operands=("tp", "domain_size"),
        predicate=lambda f, r: num(f.tp) <= num(f.domain_size),
        void=is_one("tp"),
        severity=Severity.WARNING,
        says=lambda f, r: f"tp={f.tp} is larger than the fast domain of {f.domain_size} GPUs",
        legal_keys=("tp",),
        legal_with=TP_LAWS,
        offer=offer("tensor parallelism talks in every layer: keep it inside the domain and use pp or dp across"),
    ),
    Law(
        code="MEM_STATES_GT_HBM",
        statement="the model states fit into a device",
        operands=("states_bytes", "device_bytes"),
        optional=("states_bytes_all",),
        predicate=states_fit,
        says=lambda f, r: (
            f"weights, gradients and optimizer state take at least {gib(f.states_bytes)} {where(f)}, which has "
            f"{gib(f.device_bytes)}"
        ),
        legal_more=memory_more,
        offer=memory_offer,
    ),
    Law(
        code="MEM_BORDERLINE",
        statement=f"the model states leave {MARGIN:.0%} of a device free",
        operands=("states_bytes", "device_bytes"),
        optional=("states_bytes_all",),
        predicate=lambda f, r: not states_fit(f, r) or num(f.states_bytes) <= (1 - MARGIN) * num(f.device_bytes),
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"weights, gradients and optimizer state alone take {gib(f.states_bytes)} of the {gib(f.device_bytes)} of the "
            f"fullest device, before any activation"
        ),
        legal_more=memory_more,
        offer=offer(
            "more tp or pp, a higher zero level or offload frees states; recompute frees activations, for a forward pass"
        ),
    ),
    Law(
        code="HOST_MEM",
        statement="what is offloaded by the ranks of a node fits into its host",
        operands=("host_states_bytes", "host_bytes"),
        optional=("offload_optimizer", "offload_param"),
        predicate=lambda f, r: num(f.host_states_bytes) <= num(f.host_bytes),
        void=lambda f: not (f.offload_optimizer or f.offload_param),
        says=lambda f, r: (
            f"offloaded states take at least {gib(f.host_states_bytes)} of each node's host, which has {gib(f.host_bytes)}"
        ),
        legal_more=lambda f, r: {"host_gib": [f"≥ {math.ceil(num(f.host_states_bytes) / 2**30)}"]},
        offer=offer("take hosts with more memory, more nodes, or offload less; loading needs a further copy per rank"),
    ),
)
"""All laws, in the order in which they are told."""

LAW: dict[str, Law] = {law.code: law for law in LAWS}
"""Code -> law."""
