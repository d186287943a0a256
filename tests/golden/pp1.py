# ----------------------------------------------------------------------------------------------------


class Stage0(PlanStage):
    """embed ... head on GPU 0."""

    module_names = ("embed", *(f"blocks.{index}" for index in range(0, 4)), "head")
    inputs = ("ids",)
    units = tuple(f"blocks.{index}" for index in range(0, 4))

    def forward(self, ids):
        embed = self.embed(ids)
        hidden = embed
        for layer in layers(self, "blocks", 0, 4):
            hidden = layer(hidden)
        head = self.head(hidden)
        return head


STAGES = (Stage0,)
TIED = (("embed.weight", "head.weight"),)
INPUTS = (
    Value("ids", shape=(2, 4)),
)
TARGET_DIMS = (0,)
