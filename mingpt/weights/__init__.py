"""Read and write GPT-2's weights in Hugging Face's form: a folder with config.json and model.safetensors."""
