"""OpenAI's dialect: bodies read into calls, output events written as its objects and chunks."""
