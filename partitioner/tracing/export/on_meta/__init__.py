"""Models on the meta device: traced as models on the CPU, with the values that their constructors alone compute."""
