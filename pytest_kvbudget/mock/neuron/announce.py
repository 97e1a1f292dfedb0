"""What the API server of vLLM Neuron prints and refuses before there is an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pytest_kvbudget.mock.arguments import Arguments
from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.frames import SERVE
from pytest_kvbudget.mock.process import Log


def plugin(log: Log) -> None:
    """The platform plugin is found."""
    log.say("__init__.py:37", "Available plugins for group vllm.platform_plugins:")
    log.say("__init__.py:39", "- neuron -> vllm_neuron:register")
    log.say("__init__.py:232", "Platform plugin neuron is activated")


def check(arguments: Arguments, environ: Mapping[str, str]) -> None:
    """Refuse what the plugin's configuration refuses, and what is not simulated.

    Raises:
        Failure: modes that exclude each other, CPU inference, or a configuration that is no JSON object.
    """
    frames = (*SERVE, "engine_config")
    if environ.get("VLLM_NEURON_CPU_MODE") == "1":
        if environ.get("VLLM_NEURON_CPU_COMPILE") == "1":
            text = "VLLM_NEURON_CPU_MODE and VLLM_NEURON_CPU_COMPILE are not compatible with each other"
            raise Failure("ValueError", text, frames)
        raise Failure("NotImplementedError", "the simulated device has no CPU inference", frames)
    try:
        msgspec.json.decode(arguments.additional_config, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise Failure("ValueError", f"--additional-config: {error}; expected a JSON object", frames) from None
