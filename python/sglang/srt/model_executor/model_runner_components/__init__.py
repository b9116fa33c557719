"""Parts of the model runner, each one step of bringing a model up."""
