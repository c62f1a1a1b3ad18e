"""A decode step on a modelled machine, of any batch that its memory holds by the arithmetic of a
live session. `harness.run.advise` asks for it.

Bytes are those that a live session would have in half precision (`harness.decode.needs`). A step is
walked block by block as in `predict`, in the order of a live session: rows that are chosen a layer
ahead cross the link beside the block before; rows that a layer chooses by its own query are waited
for; rows of dense layers, where others read less, cross during the whole step. Beside the counts of
`predict`, a step reads of each layer's index what the method's selection says. This is the step of
an engine, alike for every method: fused kernels, which read coded rows as they are stored, launched
at once by CUDA graphs. The last tokens that a codec leaves exact are read on the device. The
efficiencies are fitted to the paper's systems on one machine. The conflicts of a batch's sequences
are not counted, so small batches are optimistic. `Step.host_seconds` has the launches of this code,
for `harness.run.advise`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.decode.capacity import Capacity
from harness.decode.memory import GIB
from harness.decode.needs import LayerSizes, ModelSizes, Plan
from harness.decode.store import KVStore
from harness.errors import UserError
from harness.model.budgets import with_budget_as_stored
from harness.model.policies import Policy, method_policy
from harness.model.prompts import PassSizes, attention_elements
from harness.model.shape import WEIGHT_BYTES, ModelShape, as_config, count_weights
from harness.paper.costmodel.predict import BlockTimes, Work, block_ends, matmul, seconds
from harness.paper.costmodel.schemes import FITTED, Efficiency, Platform
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
LAUNCHES_OF_A_PASS = 86
"""Launches of a step outside its layers and transfers (the same)."""
PREFILL_SHARES = (FITTED.matmul, 0.85)
"""Share of the device's products that a dense prompt reaches: as fitted to the paper's systems, and
on an H100 (8 and 20 x 1,920)."""


def modelled_step(config: RunConfig, weight_bits: float = 16) -> Step:
    """The decode step of a run on a modelled machine, and in it the run's capacity.

    Raises UserError for a model that the cost model does not know, sequences beyond its limit,
    weights that the machine does not hold, and a method whose reads depend on the text.
    """
    sheet, lengths = config.platform.sheet, config.latency
    assert sheet is not None, "a modelled machine"
    platform = build(Platform, dict(sheet), "platform").together
    if config.model.shape is None:
        raise UserError(f"model={config.model.name}: its shape is not known; choose a model of it")
    shape = ModelShape.from_config(config.model.name, config.model.shape)
    if shape.num_kv_heads % platform.cards:
        heads = f"{shape.num_kv_heads} KV heads of {shape.name}"
        raise UserError(f"platform.cards={platform.cards}: must divide the {heads}")
    context = lengths.prompt_len + lengths.gen_len
    limit = config.model.shape.get("max_position_embeddings")
    if limit is not None and context > limit:
        raise UserError(
            f"prompt_len={lengths.prompt_len} and gen_len={lengths.gen_len}: {shape.name} takes "
            f"at most {limit} tokens"
        )
    described = as_config(shape.name, config.model.shape)
    num_weights = count_weights(f"model {shape.name}", described)
    plan = plan_of_shape(config, shape, round(num_weights * weight_bits / 8))
    if plan.method.tokens_read(_rows_of(lengths)[-1], shape.num_layers - 1) is None:
        raise UserError(
            f"method={config.method_name}: how many tokens it reads depends on the text, which a "
            "modelled machine has none of; give budget=, or choose another method"
        )
    host_gib = config.capacity.host_gib
    capacity = Capacity(
        f"platform={platform.name}",
        plan,
        lengths.prompt_len,
        lengths.gen_len,
        int(platform.device_bytes),
        None if host_gib is None else int(host_gib * GIB),
        config.capacity.max_batch,
    )
    hit_frac = (config.advise.hit_frac or 0.0) if config.gpu_cache else 0.0
    return Step(platform, shape, capacity, hit_frac, weight_bits=weight_bits)


def plan_of_shape(
    config: RunConfig, shape: ModelShape, weight_bytes: int, dtype: torch.dtype = DTYPE
) -> Plan:
    """The session of a run, known by the model's shape alone. dtype: of weights and exact rows.
    Raises UserError for a budget that the method cannot have."""
    assert config.model.shape is not None, "`shape` comes from there"
    geometry = _geometry(shape, config.model.shape["model_type"])
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
    model = _model_sizes(shape, geometry, method, weight_bytes, dtype)
    return Plan(model, method, codec, config.placement, config.gpu_cache)


def _rows_of(lengths: LatencyConfig) -> list[TokenCounts]:
    """The decode rows of a run, on which a budget is met."""
    prompt, context = lengths.prompt_len, lengths.prompt_len + lengths.gen_len
    return [TokenCounts(cached, prompt, context) for cached in range(prompt, context - 1)]


def _geometry(shape: ModelShape, family: str) -> Geometry:
    return Geometry(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        family=family,
    )


def _model_sizes(
    shape: ModelShape,
    geometry: Geometry,
    method: Method,
    weight_bytes: int,
    dtype: torch.dtype = DTYPE,
) -> ModelSizes:
    dense_layers = method.dense_layers
    if dense_layers >= shape.num_layers:
        raise UserError(f"method.dense_layers={dense_layers}: must be < {shape.num_layers} layers")
    softmax = Softmax(geometry.scale)
    layers = []
    for number in range(shape.num_layers):
        if number < dense_layers:
            policy = Policy("full", number, "kept", softmax, None)
        else:
            policy = method_policy(method, number, softmax, number == 0)
        layers.append(LayerSizes(policy, shape.num_kv_heads, shape.head_dim, shape.head_dim))
    projections = shape.attention_weights // shape.hidden_size
    sizes = PassSizes(
        shape.hidden_size,
        shape.head_dim,
        attention_elements(projections, geometry),
        shape.ffn_weights // shape.hidden_size,
        None,
    )
    return ModelSizes(layers, geometry, dtype, sizes, weight_bytes)


@dataclass(frozen=True)
class Step:
    """Decode steps of a capacity's batches on a machine, at the mean length of the decoding.

    platform: all cards together. hit_frac: the share of the selected rows that are on the device
    already. weight_bits: of a stored weight, which is computed with in 16.
    """

    platform: Platform
    shape: ModelShape
    capacity: Capacity
    hit_frac: float = 0.0
    efficiency: Efficiency = FITTED
    weight_bits: float = 16

    @property
    def counts(self) -> TokenCounts:
        """The row in the middle of the decoding."""
        prompt, final = self.capacity.prompt_len, self.capacity.context
        return TokenCounts((prompt + final) // 2, prompt, final)

    @property
    def budget(self) -> float:
        """Share of the full cache that the step reads, as `harness.model.budgets` counts it."""
        stores = self.capacity.plan.stores(self.capacity.lengths(1))
        exact = self.shape.token_bytes * self.counts.cached
        total = 0.0
        for index, layer in enumerate(self.capacity.plan.model.layers):
            total += self._stored_read(layer.policy, stores[index]) * stores[index].slot_bytes
        return total * self.shape.num_kv_heads / (exact * self.shape.num_layers)

    def seconds(self, batch: int) -> float:
        """Seconds of a step in a run of steps."""
        blocks = self.blocks(batch)
        ends = block_ends(blocks * NUM_WALKED, "block")
        return ends[-1] - ends[-1 - len(blocks)]

    def host_seconds(self, dense: int, selecting: int, link: float) -> float:
        """Seconds in which the host launches a step, at any batch.

        dense, selecting: launches of a layer that reads the full cache, and of one under the
        method. link: launches on the link's stream for a layer.
        """
        kinds = [layer.policy.kind for layer in self.capacity.plan.model.layers]
        launches = [(selecting if kind == "method" else dense) + link for kind in kinds]
        return (LAUNCHES_OF_A_PASS + sum(launches)) * LAUNCH_S

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
        plan, shape = self.capacity.plan, self.shape
        lengths = self.capacity.lengths(batch)
        stores = plan.stores(lengths)
        index_bytes = plan.state(lengths).read
        on_host = plan.placement == "host"
        link = self.platform.link_bytes_per_s
        governed = [layer for layer in plan.model.layers if layer.policy.kind == "method"]
        reads_less = plan.reads_less
        spread_s = 0.0  # of the dense layers' rows, in each other layer's share of the step
        if on_host and reads_less:
            for index, layer in enumerate(plan.model.layers):
                if layer.policy.kind != "method":
                    spread_s += self._row_bytes(layer.policy, stores[index]) / link / len(governed)
        join_s, weight_bytes = self._join_seconds(batch), self.weight_bits / 8
        ffn_s = self._seconds(matmul(batch, shape.ffn_weights, weight_bytes))
        blocks = []
        for index, layer in enumerate(plan.model.layers):
            policy, store = layer.policy, stores[index]
            row_bytes = self._row_bytes(policy, store)
            index_read = index_bytes.get(policy.number, 0) if policy.kind == "method" else 0
            projections = matmul(batch, shape.attention_weights, weight_bytes)
            attention = self._seconds(projections, self._attention(policy, store, row_bytes))
            index_flops = 2 * shape.num_heads / shape.num_kv_heads * index_read / WEIGHT_BYTES
            prediction = self._seconds(Work(index_flops, index_read))
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
            store_s = store.heads * store.slot_bytes / link if on_host else 0.0
            blocks.append(
                BlockTimes(
                    load=load + spread,
                    attention=attention + join_s,
                    ffn=ffn_s + join_s,
                    prediction=prediction,
                    store=store_s,
                    late=late,
                )
            )
        head = matmul(batch, shape.vocab_size * shape.hidden_size, weight_bytes)
        blocks[-1] = blocks[-1]._replace(other=self._seconds(head))
        return blocks

    def _tokens_read(self, policy: Policy) -> float:
        """Cached tokens that a KV head reads in the step."""
        if policy.kind != "method":
            return self.counts.cached
        read = self.capacity.plan.method.tokens_read(self.counts, policy.number)
        assert read is not None, "asked for before"
        return read

    def _stored_read(self, policy: Policy, store: KVStore) -> float:
        """Those of them that are read as stored: the codec leaves the last `residual` exact, on
        the device."""
        if not store.codec.residual:
            return self._tokens_read(policy)
        return store.codec.stored(self.counts.cached)

    def _row_bytes(self, policy: Policy, store: KVStore) -> float:
        """Bytes of the rows of a layer that the step reads, of all sequences, as they are
        stored."""
        return self._stored_read(policy, store) * store.heads * store.slot_bytes

    def _attention(self, policy: Policy, store: KVStore, row_bytes: float) -> Work:
        """The products with the rows that are read, and the traffic of these: kernels take coded
        rows as they are stored."""
        exact_row = self.shape.token_bytes
        read, stored = self._tokens_read(policy), self._stored_read(policy, store)
        num_bytes = row_bytes + (read - stored) * store.batch * exact_row
        return Work(4 * self.shape.query_size * (read + 1) * store.batch, num_bytes)

    def _join_seconds(self, tokens: int) -> float:
        """Seconds in which the cards add up their parts of a layer's output, twice a layer: each
        sends and takes 2 (n - 1) / n of it over its own link."""
        cards = self.platform.cards
        output_bytes = tokens * self.shape.hidden_size * WEIGHT_BYTES
        link_of_one = self.platform.link_bytes_per_s / cards
        return 2 * (cards - 1) / cards * output_bytes / link_of_one

    def _seconds(self, *works: Work) -> float:
        return seconds(self.platform, self.efficiency, *works)
