"""What the figures in docs/measurements come from: `python -m benchmarks [load|step|cuda] [--quick] [--output DIR]`.

Every figure is a ratio to a limit, and to a peer, measured in the same run by turns, so that it means something on a
noisy machine. Times on the emulated accelerator are labelled so and are never a GPU's.
"""
