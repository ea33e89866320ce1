"""A scenario at the decisions level, with the policy that the gateway has."""

from __future__ import annotations

from llmgw.endpoint import Snapshot
from llmgw.request import InferenceRequest, Refusal

from .cluster import sessions_of
from .decisions import EngineSpec, rehearse
from .records import Result
from .scenario import Scenario
