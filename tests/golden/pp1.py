# ----------------------------------------------------------------------------------------------------


class Stage0(PlanStage):
    """embed ... head on GPU 0."""

    module_names = ("embed", *(f"blocks.{index}" for index in range(0, 4)), "head")
    inputs = ("ids",)
    units = tuple(f"blocks.{index}" for index in range(0, 4))
    step_counts = {"num_targets": "mean"}
    loss_counts = ("num_targets",)

    def forward(self, ids):
        embed = self.embed(ids)
        hidden = embed
        for layer in layers(self, "blocks", 0, 4):
            hidden = layer(hidden)
        head = self.head(hidden)
        return head

    def count_microbatch(self, target):
        flatten_2 = target.flatten()
        ne = flatten_2 != -100
        num_targets = ne.sum()
        return num_targets,

    def microbatch_loss(self, output, target, num_targets):
        """Return the loss of a microbatch: its mean over the step is the loss of the whole batch."""
        head = output
        flatten = head.flatten(0, 1)
        flatten_2 = target.flatten()
        cross_entropy = F.cross_entropy(flatten, flatten_2, reduction='sum')
        mean_loss = cross_entropy / num_targets
        return mean_loss


STAGES = (Stage0,)
TIED = (("embed.weight", "head.weight"),)
INPUTS = (
    Value("ids", shape=(2, 4)),
)
ARGUMENTS = ("ids",)
CONSTANTS = {}
TARGET_DIMS = (0,)
# What `planner verify` should know of the loss: see the profile's notes.
LOSS = {'degree': 0, 'coupled': (), 'ignored': {'target': -100}}
