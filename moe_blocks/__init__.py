"""Flax Linen Mixture-of-Experts blocks whose receive buffers are sized by capacity policies."""

from moe_blocks.block import MoEBlock as MoEBlock
from moe_blocks.block import MoEOutput as MoEOutput
from moe_blocks.capacity import Capacity as Capacity
from moe_blocks.capacity import CapacitySpec as CapacitySpec
from moe_blocks.dispatch import Layout as Layout
from moe_blocks.expert_parallel import Handle as Handle
from moe_blocks.expert_parallel import Rows as Rows
from moe_blocks.expert_parallel import ep_combine as ep_combine
from moe_blocks.expert_parallel import ep_dispatch as ep_dispatch
from moe_blocks.expert_parallel import ep_prepare as ep_prepare
from moe_blocks.experts import feed_forward as feed_forward
from moe_blocks.experts import feed_forward_tokens as feed_forward_tokens
from moe_blocks.experts import promote as promote
from moe_blocks.grouped_matmul import grouped_matmul as grouped_matmul
from moe_blocks.losses import expert_load as expert_load
from moe_blocks.losses import load_balancing_loss as load_balancing_loss
from moe_blocks.losses import router_z_loss as router_z_loss
from moe_blocks.losses import update_expert_bias as update_expert_bias
from moe_blocks.routing import Router as Router
from moe_blocks.routing import Routing as Routing
from moe_blocks.routing import route as route
