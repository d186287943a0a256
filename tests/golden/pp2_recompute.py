# ----------------------------------------------------------------------------------------------------


class Stage0(PlanStage):
    """embed ... blocks.1 on GPU 0."""

    module_names = ("embed", "blocks.0", "blocks.1")
    inputs = ("ids",)
    sends = (
        Value("blocks_1", targets=(1,), shape=(2, 4, 16), requires_grad=True),
    )
    units = ("blocks.0", "blocks.1")

    def forward(self, ids):
        embed = recompute(self.embed, ids)
        hidden = embed
        for layer in layers(self, "blocks", 0, 2):
            hidden = recompute(layer, hidden)
        return hidden,


class Stage1(PlanStage):
    """blocks.2 ... head on GPU 1."""

    module_names = ("blocks.2", "blocks.3", "head")
    inputs = ()
    receives = (
        Value("blocks_1", source=0, shape=(2, 4, 16), requires_grad=True),
    )
    units = ("blocks.2", "blocks.3")
    step_counts = {"num_targets": "mean"}
    loss_counts = ("num_targets",)

    def forward(self, blocks_1):
        hidden = blocks_1
        for layer in layers(self, "blocks", 2, 4):
            hidden = recompute(layer, hidden)
        head = recompute(self.head, hidden)
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


STAGES = (Stage0, Stage1)
TIED = (("embed.weight", "head.weight"),)
INPUTS = (
    Value("ids", shape=(2, 4)),
)
ARGUMENTS = ("ids",)
CONSTANTS = {}
TARGET_DIMS = (0,)
# What `planner verify` should know of the loss: see the profile's notes.
LOSS = {'degree': 0, 'coupled': (), 'ignored': {'target': -100}}
