"""The dialect of vLLM Neuron: its budget, its compiler, its runtime and what they print."""
