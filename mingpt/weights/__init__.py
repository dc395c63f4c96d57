"""Read and write weights in Hugging Face's form: a folder with config.json and model.safetensors."""
