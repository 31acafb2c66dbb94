"""Capacity policies: what a training step consults on the size of its receive buffers.

A policy says how large the buffers of the next step are, whether a finished step counts, and what
happens after an overflow. ``StepRunner`` runs the steps that way.
"""

from policies.accumulation import accumulate as accumulate
from policies.adaptive_grow import AdaptiveGrow as AdaptiveGrow
from policies.base import CapacityOverflowError as CapacityOverflowError
from policies.base import CapacityPolicy as CapacityPolicy
from policies.base import PolicyState as PolicyState
from policies.base import Report as Report
from policies.base import peak_demand as peak_demand
from policies.config import from_config as from_config
from policies.config import names as names
from policies.config import register as register
from policies.config import to_config as to_config
from policies.decorator import Decorator as Decorator
from policies.drop import Drop as Drop
from policies.evaluation import EvalReport as EvalReport
from policies.evaluation import EvalRunner as EvalRunner
from policies.rejection_alarm import RejectionAlarm as RejectionAlarm
from policies.rejection_alarm import RunawayRouterWarning as RunawayRouterWarning
from policies.retry_dropless import RetryDropless as RetryDropless
from policies.runner import StepReport as StepReport
from policies.runner import StepRunner as StepRunner
from policies.skip_non_finite import NonFiniteError as NonFiniteError
from policies.skip_non_finite import SkipNonFinite as SkipNonFinite
from policies.static_factor import StaticFactor as StaticFactor
