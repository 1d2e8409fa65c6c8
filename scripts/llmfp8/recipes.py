"""Options of the recipes, by the names in results; 1F1L is tensorwise with the first and last layer in BF16."""
RECIPES = {
    "bf16": [],
    "delayed": ["--fp8-recipe", "delayed"],
    "tensorwise": ["--fp8-recipe", "tensorwise"],
    "1F1L": ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16"],
    "blockwise": ["--fp8-recipe", "blockwise"],
}
