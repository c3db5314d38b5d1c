"""Two optimizers outside of deepy: Jorge, and small_fc_lopt, which is learned."""

EXTENSION = {
    "optimizer": {
        "jorge": "more_optimizers.jorge.options:OPTIMIZER",
        "small_fc_lopt": "more_optimizers.small_fc_lopt.options:OPTIMIZER",
    }
}
