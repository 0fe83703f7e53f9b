"""A Model from what is in a module: its layers, matrices and vectors by shape and count. Needs no torch.

Every parameter must have its place in the Model; what has none is an error that names it. Names decide nothing: they
only tell which tensors belong to one part. Not told by any tensor, and taken as: rotary positions where none are learned.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Row
from dataclasses import dataclass

from cost_models.records import Model, Norm, Positions
from planner.errors import InputError
from planner.profiling.contents import HEAD_DIM_NAMES, HEADS_NAMES, WINDOW_NAMES, Contents, Tensor

REMEDY = (
    "Give a model file instead: `meshwright profile llama3-8b -o model.json` writes one to start from, and a Hugging Face "
    "config.json does as well"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One reading of a layer's matrices."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated_mlp: bool
    qkv: frozenset[str]
    """Names of the projections of queries, keys and values; all other matrices are `linear`."""
    linear: frozenset[str]


def model_from_structure(contents: Contents, name: str) -> Model:
    """The dense decoder that a module is, by the shapes of its parameters. InputError says what was looked for in vain."""
    layers = _layers(contents)
    layer = _alike(contents, layers)
    outside = [one for one in contents.parameters if not _within(one.name, layers)]
    head, embedding = _ends(contents, outside)
    vocab, hidden = embedding.shape
    reading = _attention(contents, layer, layers[0], hidden)
    biases, vectors = _biases(layer, reading)
    norms, head_norms = _norms(vectors, hidden)
    rest = [one for one in outside if one.same_as is None and one not in (head, embedding)]
    positions = [one for one in rest if len(one.shape) > 1 and one.shape[-1] == hidden and set(one.shape[:-2]) <= {1}]
    ends, others = _norms([one for one in rest if one not in positions], hidden)
    odd = others + (positions if len(positions) > 1 else [])
    odd += [one for one in head_norms if one.shape != (reading.head_dim,)]
    if odd or len(head_norms) not in (0, 2) or len(ends) not in (1, 2):
        named = ", ".join(f"{one.name} {one.shape}" for one in (odd or head_norms)[:6])
        raise InputError(
            f"{_lead(contents)}: the parameters {named or 'of its norms'} have no place in a decoder of embedding, layers, one "
            f"or two norms of width {hidden} outside them ({len(ends)} found), and head. {REMEDY}"
        )
    kinds = set(norms.values()) | set(ends.values())
    if len(kinds) > 1:
        raise InputError(f"{_lead(contents)}: norms with and without bias are mixed; a Model has one kind. {REMEDY}")
    return Model(
        name=name,
        num_layers=len(layers),
        hidden=hidden,
        ffn=reading.ffn,
        heads=reading.heads,
        kv_heads=reading.kv_heads,
        head_dim=reading.head_dim,
        vocab=vocab,
        tie_embeddings=(head.same_as or head.name) == (embedding.same_as or embedding.name),
        gated_mlp=reading.gated_mlp,
        # a LayerNorm without bias is one vector, as an RMSNorm is: the record counts vectors
        norm=Norm.LAYERNORM if kinds == {2} else Norm.RMSNORM,
        norms_per_layer=len(norms),
        positions=Positions.LEARNED if positions else Positions.ROPE,
        max_positions=positions[0].shape[-2] if positions else 0,
        embedding_norm=len(ends) == 2,
        qk_norm=bool(head_norms),
        qkv_bias=_all_or_none(contents, reading.qkv, biases),
        linear_bias=_all_or_none(contents, reading.linear, biases),
        sliding_window=_window(contents, layers),
    )


def _lead(contents: Contents) -> str:
    return f"{contents.kind} cannot be described"


# The ends and the layers -------------------------------------------------------------------------------------------


def _layers(contents: Contents) -> tuple[str, ...]:
    """Names of the layers: the longest outermost container of alike modules that hold matrices."""
    matrices = [one.name for one in contents.parameters if len(one.shape) == 2]
    found: list[tuple[str, ...]] = []
    for one in contents.sequences:
        alike = len(set(one.kinds)) == 1 and not any(_is_container(contents, child) for child in one.children)
        nested = any(_within(f"{one.children[0]}.", outer) for outer in found)
        if alike and not nested and sum(_within(name, one.children[:1]) for name in matrices) > 1:
            found.append(one.children)
    if not found:
        raise InputError(
            f"{_lead(contents)}: no nn.ModuleList, nn.ModuleDict or nn.Sequential of alike modules, each with several "
            f"matrices, was found; the layers must stand in one. {REMEDY}"
        )
    return max(found, key=len)


def _is_container(contents: Contents, name: str) -> bool:
    return any(one.children[0].rpartition(".")[0] == name for one in contents.sequences)


def _alike(contents: Contents, layers: tuple[str, ...]) -> list[Tensor]:
    """Parameters of one layer, named from it; InputError where layers differ."""
    parts: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for one in contents.parameters:
        for layer in layers:
            if one.name.startswith(f"{layer}."):
                parts[layer].append(Tensor(name=one.name.removeprefix(f"{layer}."), shape=one.shape))
                break
    first = parts[layers[0]]
    for layer, tensors in parts.items():
        different = set(tensors) ^ set(first)
        if different:
            one = min(different, key=lambda tensor: tensor.name)
            raise InputError(
                f"{_lead(contents)}: its layers differ: {layer} and {layers[0]} do not both have {one.name} {one.shape}; a "
                f"Model's layers are alike. {REMEDY}"
            )
    return first


def _within(name: str, parts: Row[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _ends(contents: Contents, outside: Row[Tensor]) -> tuple[Tensor, Tensor]:
    """The weights of head and embedding: two matrices of one shape, of which the second is an nn.Embedding's."""
    embeddings = [one for one in outside if _owner(one.name) in contents.embeddings]
    for embedding in embeddings:
        for head in outside:
            if head.shape == embedding.shape and _owner(head.name) not in contents.embeddings:
                return head, embedding
    found = ", ".join(f"{one.name} {one.shape}" for one in embeddings) or "none"
    raise InputError(
        f"{_lead(contents)}: no head was found: outside the layers, an nn.Embedding and an nn.Linear whose weights have one "
        f"shape (vocabulary, hidden) are looked for; nn.Embedding there: {found}. Let the factory make the module with its "
        f"head. {REMEDY}"
    )


# A layer's matrices ------------------------------------------------------------------------------------------------


def _attention(contents: Contents, layer: Row[Tensor], path: str, hidden: int) -> Attention:
    """The one way to read a layer's matrices as attention and MLP."""
    matrices = [one for one in layer if len(one.shape) > 1]
    shapes = ", ".join(f"{one.name} {one.shape}" for one in matrices[:12])
    splits = list(_splits(matrices, hidden))
    if not splits:
        raise InputError(
            f"{_lead(contents)}: the matrices of a layer are {shapes}; attention (q, k, v, or fused; then o) and an MLP (up, with "
            f"or without gate; then down) at hidden={hidden} were looked for, (outputs, inputs) each. Experts and other "
            f"layers are not read from shapes. {REMEDY}"
        )
    scores: dict[tuple[object, ...], tuple[int, bool]] = {}
    readings: dict[tuple[object, ...], Attention] = {}
    for split in splits:
        reading = _reading(split, _stated(contents, path, split.attention))
        if reading is None:
            continue
        key = (reading.heads, reading.kv_heads, reading.head_dim, reading.ffn, reading.gated_mlp)
        with_bias = _biases(layer, reading)[0]
        # where q and o are alike in shape, the biases tell which is which
        agree = all(not group & with_bias or group <= with_bias for group in (reading.qkv, reading.linear))
        score = (_apart(split.attention, split.mlp), agree)
        if key not in scores or score > scores[key]:
            scores[key], readings[key] = score, reading
    best = [readings[key] for key, score in scores.items() if score == max(scores.values())]
    if len(best) == 1:
        return best[0]
    raise InputError(
        f"{_lead(contents)}: {_why_no_heads(contents, path, splits, len(best))}; its matrices: {shapes}. Set `num_heads` and "
        f"`head_dim` on the attention, and keep attention and MLP in modules of their own. {REMEDY}"
    )


def _why_no_heads(contents: Contents, path: str, splits: "Row[_Split]", ways: int) -> str:
    if ways:
        return f"the matrices of a layer can be read in {ways} ways"
    if any(_stated(contents, path, one.attention) == (None, None) for one in splits):
        return (
            f"neither the attention of {path}, nor a module around it, nor a configuration states the heads or their width; "
            f"{', '.join((*HEADS_NAMES, *HEAD_DIM_NAMES))} were looked for"
        )
    return f"the heads that {path} states do not divide its projections"


def _reading(split: "_Split", stated: tuple[int | None, int | None]) -> Attention | None:
    """A split with its heads; None where nobody states them or they do not fit its widths."""
    heads, head_dim = stated
    if heads is None and head_dim is None:
        return None
    head_dim = head_dim or split.query // (heads or 1)
    if not head_dim:
        return None
    heads = heads or split.query // head_dim
    if heads * head_dim != split.query or split.kv % head_dim or heads % (split.kv // head_dim):
        return None
    return Attention(
        heads=heads,
        kv_heads=split.kv // head_dim,
        head_dim=head_dim,
        ffn=split.ffn,
        gated_mlp=sum(one.shape[0] for one in split.mlp[:-1]) == 2 * split.ffn,
        qkv=frozenset(one.name for one in split.attention[:-1]),
        linear=frozenset(one.name for one in (split.attention[-1], *split.mlp)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A layer's matrices as attention and MLP."""

    attention: tuple[Tensor, ...]
    """The projection of the output last."""
    mlp: tuple[Tensor, ...]
    """The one that leads back last."""
    query: int
    kv: int
    ffn: int
    """Widths of all queries, all keys, and the MLP."""


def _splits(matrices: Row[Tensor], hidden: int) -> Iterator[_Split]:
    """Each way that the shapes allow."""
    if not 4 <= len(matrices) <= 7 or any(len(one.shape) != 2 for one in matrices):
        return
    for o, down in itertools.permutations(matrices, 2):
        into = [one for one in matrices if one is not o and one is not down]
        if o.shape[0] != hidden or down.shape[0] != hidden or any(one.shape[1] != hidden for one in into):
            continue
        query, ffn = o.shape[1], down.shape[1]
        for count in range(1, len(into)):
            for qkv in itertools.combinations(into, count):
                up = tuple(one for one in into if one not in qkv)
                kv = _kv_width([one.shape[0] for one in qkv], query)
                # up alone; up and gate fused; up and gate
                if kv and [one.shape[0] for one in up] in ([ffn], [2 * ffn], [ffn, ffn]):
                    yield _Split(attention=(*qkv, o), mlp=(*up, down), query=query, kv=kv, ffn=ffn)


def _kv_width(widths: list[int], query: int) -> int | None:
    """Width of the keys where `widths` are q, k, v, or q and both others fused, or all fused; None where they are not."""
    twice = sum(widths) - query
    if twice <= 0 or twice % 2 or twice > 2 * query:
        return None
    legal: dict[int, list[int]] = {1: widths, 2: [query, twice], 3: [query, twice // 2, twice // 2]}
    return twice // 2 if Counter(legal.get(len(widths), [])) == Counter(widths) else None


def _apart(attention: Row[Tensor], mlp: Row[Tensor]) -> int:
    """How many of the two stand in a module that holds nothing of the other."""
    pairs = ((attention, mlp), (mlp, attention))
    return sum(not any(_inside(_common(own), other.name) for other in others) for own, others in pairs)


def _common(tensors: Row[Tensor]) -> str:
    """The innermost module that holds all of them; empty = the layer."""
    owners = [_owner(one.name).split(".") for one in tensors]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*owners, strict=False))
    return ".".join(level[0] for level in levels)


def _inside(part: str, name: str) -> bool:
    return not part or name.startswith(f"{part}.")


def _stated(contents: Contents, layer: str, attention: Row[Tensor]) -> tuple[int | None, int | None]:
    """(heads, their width) as the attention, what is in it, or what is around it states; None = nobody does."""
    part = ".".join(filter(None, (layer, _common(attention))))
    inner = [name for name in contents.numbers if name.startswith(f"{part}.")]
    parts = part.split(".")
    places = [part, *inner, *(".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1))]
    stated = [contents.numbers.get(place, {}) for place in places]
    heads, head_dim = (
        next((one[name] for one in stated for name in names if name in one), None)
        for names in (HEADS_NAMES, HEAD_DIM_NAMES)
    )
    return heads, head_dim


# Vectors -----------------------------------------------------------------------------------------------------------


def _biases(layer: Row[Tensor], reading: Attention) -> tuple[set[str], list[Tensor]]:
    """Names of the matrices that have a bias, and the parameters that are neither matrix nor bias."""
    of_bias = {name.removesuffix("weight") + "bias": name for name in (*reading.qkv, *reading.linear)}
    vectors = [one for one in layer if len(one.shape) < 2]
    with_bias = {of_bias[one.name] for one in vectors if one.name in of_bias}
    return with_bias, [one for one in vectors if one.name not in of_bias]


def _all_or_none(contents: Contents, matrices: frozenset[str], with_bias: set[str]) -> bool:
    found = matrices & with_bias
    if found and found != matrices:
        raise InputError(
            f"{_lead(contents)}: {', '.join(sorted(found))} have a bias, {', '.join(sorted(matrices - found))} have none; a Model "
            f"says it of all of them at once. {REMEDY}"
        )
    return bool(found)


def _norms(tensors: Row[Tensor], hidden: int) -> tuple[dict[str, int], list[Tensor]]:
    """Module -> its vectors (1 or 2) of width hidden, and the parameters that are no such norm."""
    vectors: dict[str, list[Tensor]] = {}
    for one in tensors:
        vectors.setdefault(_owner(one.name), []).append(one)
    norms = {
        owner: len(own)
        for owner, own in vectors.items()
        if len(own) <= 2 and all(one.shape == (hidden,) for one in own)
    }
    return norms, [one for one in tensors if _owner(one.name) not in norms]


def _window(contents: Contents, layers: Row[str]) -> int | None:
    """The window that all layers state; mixed ones count as full attention, an upper bound."""
    found: set[int | None] = set()
    for layer in layers:
        inside = [own for name, own in contents.numbers.items() if f"{name}.".startswith(f"{layer}.")]
        found.add(next((own[name] for own in inside for name in WINDOW_NAMES if name in own), None))
    return found.pop() if len(found) == 1 else None
