"""The OpenAI routes: chat completions, completions, models. `router.build_openai_router` builds them."""
