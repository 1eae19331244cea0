"""What a weight transfer engine sees of vLLM 0.33.0, without vLLM: signatures as there, bodies as short as they can be.

`test_contract.py` compares the signatures with an installed vLLM's. What is left out touches no engine without a GPU:
`update_weights` synchronises the accelerator, workers retarget draft models and reset LoRA.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

BASE = "vllm/distributed/weight_transfer/base.py"
FACTORY = "vllm/distributed/weight_transfer/factory.py"
RELOAD = "vllm/model_executor/model_loader/reload/layerwise.py"
WORKER = "vllm/v1/worker/gpu_worker.py"


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    init_info_cls: type[Any]
    update_info_cls: type[Any]
    supports_draft_weight_update: bool = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device = config, vllm_config, device
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self.model = model
        self._default_model, self._default_model_config = self.model, self.model_config

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        self.model, self.model_config = self._default_model, self._default_model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info for {self.__class__.__name__}: {error}") from error

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(f"Invalid update_info for {self.__class__.__name__}: {error}") from error

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, Callable[[], type[WeightTransferEngine]]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls

    @classmethod
    def create_engine(
        cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> WeightTransferEngine:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


def initialize_layerwise_reload(model: Any) -> None:
    assert not model.loading  # real layers would keep what was loaded
    model.loading = True


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:
    model, _ = args
    model.loading = False


class Worker:
    """The sessions of a worker."""

    def __init__(self, model: torch.nn.Module) -> None:
        config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace())
        transfer = SimpleNamespace(backend="weightswap")
        device = torch.device("cpu")
        self.model = model
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(transfer, config, device, model)
        self._weight_update_active = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def shutdown(self) -> None:
        self.weight_transfer_engine.shutdown()


def collective_rpc(workers: list[Worker], method: str, *args: Any) -> None:
    """Call a method on every worker; then raise the error of the first that failed."""
    errors = []
    for worker in workers:
        try:
            getattr(worker, method)(*args)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be vLLM, for the test."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    here = sys.modules[__name__]
    modules = {
        "vllm": (),
        "vllm.distributed": (),
        "vllm.distributed.weight_transfer": ("WeightTransferEngine", "WeightTransferEngineFactory"),
        "vllm.distributed.weight_transfer.base": ("WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        "vllm.model_executor": (),
        "vllm.model_executor.model_loader": (),
        "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    }
    for name, offered in modules.items():
        module = ModuleType(name)
        vars(module).update({each: getattr(here, each) for each in offered})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "weightswap_vllm", raising=False)
