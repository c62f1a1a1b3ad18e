"""A decode step on a modelled machine, of any batch that its memory holds by the arithmetic of a
live session. `harness.run.advise` asks for it.

Bytes are those that a live session would have in half precision (`harness.decode.needs`). A step is
walked block by block as in `predict`, in the order of a live session: rows that are chosen a layer
ahead cross the link beside the block before; rows that a layer chooses by its own query are waited
for; rows of dense layers, where others read less, cross during the whole step. Beside the counts of
`predict`, a step reads of each layer's index what the method's selection says. This is the step of
an engine, alike for every method: fused kernels, which read coded rows as they are stored, in one
CUDA graph, each of whose nodes costs `NODE_S` beside its work. The last tokens that a codec leaves
exact are read on the device. The efficiencies are fitted to the paper's systems on one machine. The
conflicts of a batch's sequences are not counted. `Step.host_seconds` has this code's host, which
launches kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.decode.needs import Capacity, LayerSizes, ModelSizes, Plan
from harness.decode.store import KVStore
from harness.errors import UserError
from harness.model.budgets import with_budget_as_stored
from harness.model.policies import Policy, method_policy
from harness.model.prompts import PassSizes, attention_elements
from harness.model.shape import WEIGHT_BYTES, ModelShape, as_config, count_weights
from harness.paper.costmodel.predict import (
    FITTED,
    BlockTimes,
    Efficiency,
    Platform,
    Work,
    block_ends,
    matmul,
    seconds,
)
from harness.replay.setup import codec_of
from harness.settings.config import LatencyConfig, RunConfig
from harness.settings.schema import build
from methods.attention import Softmax
from methods.base import Geometry, Method, TokenCounts

DTYPE = torch.float16
NUM_WALKED = 3
"""Steps that are walked; the last one is steady."""
LAUNCH_S = 55e-6
"""Seconds of the host for one launch of a step, its Python included: the geometric mean of three
steps of an H100 that the host limited (ideal, offload+h2o and infinigen2+rows at 8 x 1,920). Four
others took 0.6 to 1.6 times as long as this number says (benchmarks/NOTES.md)."""
NODE_S = 1e-6
"""Seconds of a node of a CUDA graph, beside its work (the same H100)."""
LAUNCHES_OF_A_PASS = 86
"""Launches of a step outside its layers and transfers (the same)."""
FULL_LAUNCHES, FUSED_LAUNCHES, LINK_LAUNCHES = 17, 33, 3
"""Launches of a layer: that reads the full cache; under a method that reads less, by fused kernels,
which are as many as InfiniGen2's here; and on the link's stream (the same)."""
PREFILL_SHARES = (FITTED.matmul, 0.85)
"""Share of the device's products that a dense prompt reaches: as fitted to the paper's systems, and
on an H100 (8 and 20 x 1,920)."""


def modelled_step(config: RunConfig, weight_bits: float = 16) -> Step:
    """The decode step of a run on a modelled machine, and in it the run's capacity.

    Raises UserError for a model that the cost model does not know, sequences beyond its limit,
    weights that the machine does not hold, and a method whose reads depend on the text.
    """
    name, described, lengths = config.model.name, config.model.shape, config.latency
    assert config.platform.sheet is not None, "a modelled machine"
    platform = build(Platform, dict(config.platform.sheet), "platform").together
    if described is None:
        raise UserError(f"model={name}: its shape is not known; choose a model of it")
    shape = ModelShape.from_config(name, described)
    if shape.num_kv_heads % platform.cards:
        heads = f"{shape.num_kv_heads} KV heads of {name}"
        raise UserError(f"platform.cards={platform.cards}: must divide the {heads}")
    limit = described.get("max_position_embeddings")
    if limit is not None and lengths.prompt_len + lengths.gen_len > limit:
        given = f"prompt_len={lengths.prompt_len} and gen_len={lengths.gen_len}"
        raise UserError(f"{given}: {name} takes at most {limit} tokens")
    num_weights = count_weights(f"model {name}", as_config(name, described))
    plan = plan_of_shape(config, shape, round(num_weights * weight_bits / 8))
    if plan.method.tokens_read(_rows_of(lengths)[-1], shape.num_layers - 1) is None:
        raise UserError(
            f"method={config.method_name}: how many tokens it reads depends on the text, which a "
            "modelled machine has none of; give budget=, or choose another method"
        )
    capacity = Capacity(
        f"platform={platform.name}",
        plan,
        lengths.prompt_len,
        lengths.gen_len,
        int(platform.device_bytes),
        None if platform.host_bytes is None else int(platform.host_bytes),
        config.capacity.max_batch,
    )
    hit_frac = (config.advise.hit_frac or 0.0) if config.gpu_cache else 0.0
    return Step(platform, shape, capacity, hit_frac, weight_bits=weight_bits)


def plan_of_shape(config: RunConfig, shape: ModelShape, weight_bytes: int) -> Plan:
    """The session of a run, known by the model's shape alone. Raises UserError for a budget that
    the method cannot have."""
    assert config.model.shape is not None, "`shape` comes from there"
    geometry = geometry_of(shape, config.model.shape["model_type"])
    method, codec = config.method, codec_of(config)
    if config.budget is not None and not config.budget_is_measured:
        method = with_budget_as_stored(
            method,
            codec,
            geometry,
            _rows_of(config.latency),
            config.budget,
            nearest=config.budget_rule == "nearest",
            preset=config.method_name,
            warns=False,
        )
    model = sizes_of_shape(shape, geometry, method, weight_bytes)
    return Plan(model, method, codec, config.placement, config.gpu_cache)


def _rows_of(lengths: LatencyConfig) -> list[TokenCounts]:
    """The decode rows of a run, on which a budget is met."""
    prompt, context = lengths.prompt_len, lengths.prompt_len + lengths.gen_len
    return [TokenCounts(cached, prompt, context) for cached in range(prompt, context - 1)]


def geometry_of(shape: ModelShape, family: str) -> Geometry:
    """The attention of a model of equal layers."""
    return Geometry(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        family=family,
    )


def sizes_of_shape(
    shape: ModelShape, geometry: Geometry, method: Method, weight_bytes: int
) -> ModelSizes:
    """The sizes of a model of equal layers, as `harness.decode.needs.sizes_of` has them of a loaded
    one."""
    dense_layers, softmax = method.dense_layers, Softmax(geometry.scale)
    if dense_layers >= shape.num_layers:
        raise UserError(f"method.dense_layers={dense_layers}: must be < {shape.num_layers} layers")
    policies = [Policy("full", number, "kept", softmax, None) for number in range(dense_layers)]
    for number in range(dense_layers, shape.num_layers):
        policies.append(method_policy(method, number, softmax, number == 0))
    projections = shape.attention_weights // shape.hidden_size
    sizes = PassSizes(
        shape.hidden_size,
        shape.head_dim,
        attention_elements(projections, geometry),
        shape.ffn_weights // shape.hidden_size,
        None,
    )
    cached = shape.num_kv_heads, shape.head_dim, shape.head_dim
    layers = [LayerSizes(policy, *cached) for policy in policies]
    return ModelSizes(layers, geometry, DTYPE, sizes, weight_bytes)


class LayerRead(NamedTuple):
    """What a step reads of a layer's cache. tokens: of each sequence, mean over its KV heads;
    stored: those of them that are read as stored: a codec leaves the last `residual` exact, on the
    device."""

    policy: Policy
    store: KVStore
    tokens: float
    stored: float

    @property
    def row_bytes(self) -> float:
        """Bytes of the stored rows, of all sequences."""
        return self.stored * self.store.heads * self.store.slot_bytes


@dataclass(frozen=True)
class Step:
    """Decode steps of a capacity's batches on a machine, at the mean length of the decoding.

    platform: all cards together. hit_frac: the share of the selected rows that are on the device
    already. weight_bits: of a stored weight, which is computed with in 16. node_s: as `NODE_S`.
    """

    platform: Platform
    shape: ModelShape
    capacity: Capacity
    hit_frac: float = 0.0
    efficiency: Efficiency = FITTED
    weight_bits: float = 16
    node_s: float = NODE_S

    def reads(self, batch: int) -> list[LayerRead]:
        """What the step in the middle of the decoding reads, layer by layer."""
        capacity, plan = self.capacity, self.capacity.plan
        prompt, final = capacity.prompt_len, capacity.context
        counts = TokenCounts((prompt + final) // 2, prompt, final)
        stores = plan.stores(capacity.lengths(batch))
        reads = []
        for index, layer in enumerate(plan.model.layers):
            codec, tokens = stores[index].codec, float(counts.cached)
            if layer.policy.kind == "method":
                known = plan.method.tokens_read(counts, layer.policy.number)
                assert known is not None, "asked for before"
                tokens = known
            stored = codec.stored(counts.cached) if codec.residual else tokens
            reads.append(LayerRead(layer.policy, stores[index], tokens, stored))
        return reads

    @property
    def budget(self) -> float:
        """Share of the full cache that the step reads, as `harness.model.budgets` counts it."""
        cached = (self.capacity.prompt_len + self.capacity.context) // 2
        total = 0.0
        for read in self.reads(1):
            total += read.stored * read.store.slot_bytes
        exact = self.shape.token_bytes * cached
        return total * self.shape.num_kv_heads / (exact * self.shape.num_layers)

    def seconds(self, batch: int) -> float:
        """Seconds of a step in a run of steps."""
        blocks = self.blocks(batch)
        ends = block_ends(blocks * NUM_WALKED, "block")
        return ends[-1] - ends[-1 - len(blocks)]

    def host_seconds(self, launches: int) -> float:
        """Seconds in which this code's host launches a step, at any batch. launches: of a layer
        under the method."""
        plan = self.capacity.plan
        link = LINK_LAUNCHES if plan.placement == "host" else 0
        total = LAUNCHES_OF_A_PASS
        for layer in plan.model.layers:
            total += link + (launches if layer.policy.kind == "method" else FULL_LAUNCHES)
        return total * LAUNCH_S

    def prefill_seconds(self, share: float) -> float:
        """Seconds of one dense prompt alone. share: of the device's products that it reaches."""
        shape, prompt_len = self.shape, self.capacity.prompt_len
        per_token = 2 * (shape.attention_weights + shape.ffn_weights) * shape.num_layers
        pairs = prompt_len**2 / 2  # a token and those before it
        flops = per_token * prompt_len + 4 * shape.query_size * pairs * shape.num_layers
        joins_s = 2 * shape.num_layers * self._join_seconds(prompt_len)
        return flops / (self.platform.flops_per_s * share) + joins_s

    def blocks(self, batch: int) -> list[BlockTimes]:
        """The times of each block, when nothing waits."""
        plan, shape, link = self.capacity.plan, self.shape, self.platform.link_bytes_per_s
        reads, on_host, reads_less = self.reads(batch), plan.placement == "host", plan.reads_less
        index_bytes = plan.state(self.capacity.lengths(batch)).read
        num_governed = sum(read.policy.kind == "method" for read in reads)
        spread_s = 0.0  # of the dense layers' rows, in each other layer's share of the step
        for read in reads:
            if on_host and reads_less and read.policy.kind != "method":
                spread_s += read.row_bytes / link / num_governed
        join_s, weight_bytes = self._join_seconds(batch), self.weight_bits / 8
        projections = matmul(batch, shape.attention_weights, weight_bytes)
        ffn_s = self._seconds(matmul(batch, shape.ffn_weights, weight_bytes))
        blocks = []
        for read in reads:
            policy, store, row_bytes = read.policy, read.store, read.row_bytes
            # Kernels take coded rows as they are stored.
            num_bytes = row_bytes + (read.tokens - read.stored) * batch * shape.token_bytes
            products = Work(4 * shape.query_size * (read.tokens + 1) * batch, num_bytes)
            index_read = index_bytes.get(policy.number, 0)
            index_flops = 2 * shape.num_heads / shape.num_kv_heads * index_read / WEIGHT_BYTES
            is_fused = policy.kind == "method" and not plan.method.reads_all
            nodes_s = self.node_s * (FUSED_LAUNCHES if is_fused else FULL_LAUNCHES)
            store_s = store.heads * store.slot_bytes / link + LINK_LAUNCHES * self.node_s
            load = late = spread = 0.0
            if on_host and policy.kind == "method":
                spread = spread_s
                load = row_bytes / link
                if policy.names_rows:
                    load /= self.efficiency.row_fetch
                    if plan.gpu_cache:
                        load *= 1 - self.hit_frac
                if policy.when == "own_query":
                    load, late = 0.0, load
            elif on_host and not reads_less:
                load = row_bytes / link
            blocks.append(
                BlockTimes(
                    load=load + spread,
                    attention=self._seconds(projections, products) + join_s + nodes_s,
                    ffn=ffn_s + join_s,
                    prediction=self._seconds(Work(index_flops, index_read)),
                    store=store_s if on_host else 0.0,
                    late=late,
                )
            )
        head = matmul(batch, shape.vocab_size * shape.hidden_size, weight_bytes)
        other_s = self._seconds(head) + LAUNCHES_OF_A_PASS * self.node_s
        blocks[-1] = blocks[-1]._replace(other=other_s)
        return blocks

    def _join_seconds(self, tokens: int) -> float:
        """Seconds in which the cards add up their parts of a layer's output, twice a layer: each
        sends and takes 2 (n - 1) / n of it over its own link."""
        cards = self.platform.cards
        output_bytes = tokens * self.shape.hidden_size * WEIGHT_BYTES
        link_of_one = self.platform.link_bytes_per_s / cards
        return 2 * (cards - 1) / cards * output_bytes / link_of_one

    def _seconds(self, *works: Work) -> float:
        return seconds(self.platform, self.efficiency, *works)
