"""Opens a model in two steps: first everything that is cheap to check, then weights and engine.

`open_model` finds the model and returns an `OpenedModel`, whose method `load` loads the weights and
whose method `engine` makes an engine of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.device.host_limits import usable_cores
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.layers.mxfp4_format import Units, WeightFormat, format_name, units_of
from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.adapters import add_adapters, slot_numbers
from batchgen.engine.loading.config_file import LoadFormat, load_model_config, strange_keys
from batchgen.engine.loading.loader import Quantization, chosen_form, load_model
from batchgen.engine.loading.peft_files import AdapterFile
from batchgen.engine.loading.safetensors_files import safetensors_files
from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer
from batchgen.engine.lora.layer_lora import num_slots
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_config import KVCacheDtype, ModelConfig
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.model_source import resolve_model
from batchgen.util.shorten import some_names
from batchgen.util.text.text_table import size_text

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose configuration and tokenizer are read, but whose weights are not loaded yet.

    Attributes:
        path: the model's folder or GGUF file.
        config: the model's architecture and sizes, as the checkpoint's config says.
        tokenizer: None if the model comes without one.
        eos_token_ids: the token ids that end an answer of this model.
        load_format: how the weights are loaded, as for `load_model`.
        quantization: what is done to the weights while they load, as for `load_model`.
        with_vision: whether the tower that reads images is loaded, too.
        adapters: the adapters, by their names.
        folds: whether the only adapter is added to the weights when they are loaded.
        adapter_template: whether tokenizer and chat template are those of the only adapter.
        default_adapter: the adapter of rows that ask for none; None means no adapter.
    """

    path: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    load_format: LoadFormat
    quantization: Quantization | None = None
    with_vision: bool = False
    adapters: Mapping[str, AdapterFile] = field(default_factory=dict)
    default_adapter: str | None = None
    folds: bool = False
    adapter_template: bool = False

    def with_hidden_layers(self, indices: Sequence[int]) -> OpenedModel:
        """Return the model that records the hidden states after these layers: 0 is the embedding, n
        the n-th layer, and negative numbers count from the last layer, -1. Raises ValueError for a
        layer that the model lacks or that is named twice."""
        last = self.config.num_layers
        layers = tuple(layer + last + 1 if layer < 0 else layer for layer in indices)
        pairs = zip(indices, layers, strict=True)
        if outside := [one for one, layer in pairs if not 0 <= layer <= last]:
            raise ValueError(
                f"hidden_layers has {outside[0]}, and the model has {last} layers: choose among "
                f"0 (the embedding of tokens) to {last} (after the last layer and the norm), or "
                "-1"
            )
        if len(set(layers)) != len(layers):
            raise ValueError(f"hidden_layers names a layer twice: {list(indices)}")
        return replace(self, config=replace(self.config, hidden_layers=layers))

    def dtype(self, name: DtypeName, device: DeviceName) -> torch.dtype:
        """Return the dtype of weights and activations on a device. Raises ValueError if the machine
        lacks the device.

        `auto` is the checkpoint's dtype on a GPU. On a CPU it is float32, because only in that are
        a row's tokens exactly independent of the batch.
        """
        target = device_of(device)
        if name == "auto":
            return torch.float32 if target.type == "cpu" else self.config.dtype
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def form(self, units: Units) -> WeightFormat | None:
        """Return the format of the layers' weights on a device that computes from these formats;
        None if it is the model's dtype."""
        return chosen_form(self.config, self.quantization, units)

    def weights_text(self, dtype: torch.dtype, device: DeviceName) -> str | None:
        """Return a text with the format of the weights on a device, and with the formats of
        activations or caches that the checkpoint expects and the engine does not use, such as
        "dequantised NVFP4; activations: bfloat16 instead of FP8". None if the weights have the
        model's dtype."""
        form, packed = self.form(units_of(device_of(device), dtype)), self.config.form
        instead = self._unused_text(packed, dtype) if isinstance(packed, PackedFormat) else ""
        if form is None:
            if not isinstance(packed, PackedFormat):
                return None
            return f"dequantised {packed.name}{instead}"
        return f"{'' if form.native else 'dequantised '}{format_name(form)}{instead}"

    def _unused_text(self, packed: PackedFormat, dtype: torch.dtype) -> str:
        """Return the formats of activations or caches that a checkpoint expects and the engine does
        not use, each after a semicolon."""
        name = str(dtype).removeprefix("torch.")
        cache = "FP8" if self.config.kv_cache_dtype == "fp8" else name
        formats = (("activations", name, packed.activations), ("KV cache", cache, packed.kv_cache))
        return "".join(
            f"; {what}: {used} instead of {expected}"
            for what, used, expected in formats
            if expected and expected != used
        )

    def kv_cache_lack(self, units: Units) -> str | None:
        """Return why a GPU cannot keep keys and values in the configured format, as an error
        message; None if it can. `units` are the formats from which it computes."""
        if self.config.kv_cache_dtype == "auto" or units.fp8:
            return None
        return (
            "model.kv_cache_dtype is fp8, which GPUs convert from compute capability 8.9 on (Ada, "
            "Hopper, Blackwell), and this one is older: set it to auto"
        )

    @property
    def file_bytes(self) -> int:
        """The bytes of the files of weights, of a GGUF file or of safetensors; 0 without any."""
        if self.load_format == "dummy":
            return 0
        files = safetensors_files(self.path) if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)

    def adapter_bytes(self, weights: CausalLM, slots: int | None, *, on_cpu: bool) -> int:
        """Return the bytes that the adapters take on a device.

        Args:
            weights: the model's modules, whose parameters need no values.
            slots: the number of adapters that a GPU holds at a time (`EngineConfig.lora_slots`).
            on_cpu: whether the device is a CPU, which holds all adapters as they are.
        """
        adapters = list(self.adapters.values())
        if self.folds or not adapters:
            return 0
        if on_cpu:
            numbers = sum(one.num_parameters for one in adapters)
        else:
            numbers = slot_numbers(weights, adapters) * num_slots(len(adapters), slots)
        return numbers * weights.dtype.itemsize

    def load(
        self,
        dtype: DtypeName,
        device: DeviceName,
        heads: Collection[str] = (),
        parallel: TensorParallel = ALONE,
        lora_slots: int | None = None,
    ) -> CausalLM:
        """Load the model with its weights and some of its heads, and with `lora_slots` slots for
        its adapters, see `EngineConfig`.

        On a CPU this also limits torch to as many threads as can run at once. If weights in FP8 or
        MXFP4 are dequantised, because the device does not compute from them, stderr says so.

        Raises:
            ValueError: a tensor is missing or wrong, or the machine has no such device.
        """
        target = device_of(device)
        if target.type == "cpu" and parallel.size == 1:
            limit_threads()
        torch_dtype = self.dtype(dtype, device)
        form, packed = self.form(units_of(target, torch_dtype)), self.config.form
        name = str(torch_dtype).removeprefix("torch.")
        if form is not None and not form.native:
            as_form = format_name(form)
            print(
                f"model: this device does not compute in {as_form}, so weights in {as_form} are "
                f"dequantised to {name}",
                file=sys.stderr,
                flush=True,
            )
        if isinstance(packed, PackedFormat):
            is_packed = form is not None and self.quantization is None
            instead = f"are dequantised to {name} ({size_text(self.file_bytes)} in the files)"
            print(
                f"model: weights in {packed.name} {'stay in 4 bits' if is_packed else instead}"
                f"{self._unused_text(packed, torch_dtype) or f'; activations: {name}'}",
                file=sys.stderr,
                flush=True,
            )
        model = load_model(
            self.path,
            device=target,
            dtype=torch_dtype,
            load_format=self.load_format,
            heads=heads,
            quantization=self.quantization,
            parallel=parallel,
            vision=self.with_vision,
            hidden_layers=self.config.hidden_layers,
            kv_cache_dtype=self.config.kv_cache_dtype,
        )
        if self.adapters:
            add_adapters(
                model, self.adapters, self.default_adapter, fold=self.folds, slots=lora_slots
            )
        return model

    def load_beside(self, model: CausalLM) -> CausalLM:
        """Load the model with its weights, on the device and in the dtype of another model, and
        divided between the same ranks."""
        return load_model(
            self.path,
            device=model.device,
            dtype=model.dtype,
            load_format=self.load_format,
            parallel=model.parallel,
            kv_cache_dtype=self.config.kv_cache_dtype,
        )

    def engine(
        self,
        model: CausalLM,
        strategy: Strategy,
        config: EngineConfig,
        others: Mapping[str, CausalLM] | None = None,
        compiler: GrammarCompiler | None = None,
        context_columns: Sequence[str] = (),
        leader: Leader | None = None,
    ) -> LLMEngine:
        """Make an engine for the loaded model.

        Args:
            others: the strategy's other models with their weights, by name.
            compiler: compiles constraints; None lets the engine make one when a row needs it.
            context_columns: the names of the columns of context scope that rows may ask for.
            leader: the other ranks between which the weights are divided; None without any.

        Raises:
            ValueError: the configuration does not suit the models or the device's memory.
        """
        return LLMEngine(
            model,
            self.tokenizer,
            self.eos_token_ids,
            strategy,
            config,
            others=others,
            compiler=compiler,
            context_columns=context_columns,
            leader=leader,
        )

    def grammar_compiler(self) -> GrammarCompiler:
        """Make a compiler of constraints for this model's tokenizer and vocabulary."""
        if self.tokenizer is None:
            raise ValueError(
                "a constraint is about text, and the model comes without a tokenizer: use a model "
                "with one, or no constraint"
            )
        if not self.eos_token_ids:
            raise ValueError(
                "a constrained row ends with EOS, and neither the model's configuration nor its "
                "tokenizer names an EOS token: set eos_token_id in generation_config.json, or use "
                "no constraint"
            )
        special_ids = (*self.eos_token_ids, *self.config.never_generated)
        return GrammarCompiler(self.tokenizer, self.config.vocab_size, special_ids)


def open_model(
    model: str,
    revision: str | None,
    load_format: LoadFormat,
    quantization: Quantization | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> OpenedModel:
    """Find a model and read its configuration and tokenizer; a hub model is downloaded first.

    `kv_cache_dtype` is that of `ModelConfig`.

    Raises:
        ValueError: the model cannot be found or is not supported; the message says what to do.
    """
    path = resolve_model(model, revision, weights=load_format != "dummy")
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"load_format is gguf, but {path} is not a .gguf file")
    config, tokenizer = load_model_config(path, load_format), load_tokenizer(path)
    if strange := strange_keys(path):
        print(
            f"model: {path}/config.json has keys that neither transformers nor the engine knows; "
            f"they are ignored: {some_names(strange)}",
            file=sys.stderr,
            flush=True,
        )
    if config.untied:
        print(
            f"model: {path}/config.json has tie_word_embeddings=true, but the checkpoint's "
            "embedding and lm_head differ: both are used, as with tie_word_embeddings=false",
            file=sys.stderr,
            flush=True,
        )
    if path.is_dir() and load_format != "dummy":
        safetensors_files(path)  # This raises an error if there are none.
    # Some checkpoints name ids behind those that the model has, which no answer can end with.
    eos = tuple(i for i in eos_token_ids(path, tokenizer) if 0 <= i < config.vocab_size)
    config = replace(config, kv_cache_dtype=kv_cache_dtype)
    return OpenedModel(path, config, tokenizer, eos, load_format, quantization)


def limit_threads() -> None:
    """Limit torch to as many threads as the process may run at once, unless OMP_NUM_THREADS is set.
    In a container torch would start a thread for each core of the host."""
    if "OMP_NUM_THREADS" not in os.environ and (cores := usable_cores()) < torch.get_num_threads():
        torch.set_num_threads(cores)


def device_of(name: DeviceName) -> torch.device:
    """Return the device of this name. Raises ValueError if it is a GPU and the machine has none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch sees no GPU: use auto or cpu")
    return torch.device(name)
