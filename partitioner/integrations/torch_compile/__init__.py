"""``torch.compile(model, backend="partitioner", options={...})``: partition each graph that Dynamo hands over."""
