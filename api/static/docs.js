// The API's description as a page: /openapi.json, path by path.
const element = (tag, text = "", className = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
};

function schemaView(name, schema) {
  const box = element("details");
  box.append(element("summary", name), element("pre", JSON.stringify(schema, null, 2)));
  return box;
}

function refName(content) {
  const ref = content?.["application/json"]?.schema?.$ref;
  return ref?.split("/").pop();
}

function operationView(method, path, operation, schemas) {
  const box = element("article");
  const title = element("h2");
  title.append(element("code", method.toUpperCase(), "method"), element("code", path));
  box.append(title, element("p", operation.description ?? operation.summary));
  for (const parameter of operation.parameters ?? [])
    box.append(element("p", `${parameter.in} ${parameter.name}: ${parameter.description}`));
  const asked = refName(operation.requestBody?.content);
  if (asked) box.append(schemaView(`Body: ${asked}`, schemas[asked]));
  for (const [status, answer] of Object.entries(operation.responses)) {
    const name = refName(answer.content);
    if (name) box.append(schemaView(`${status}: ${answer.description}`, schemas[name]));
    else box.append(element("p", `${status}: ${answer.description}`));
  }
  return box;
}

const description = await (await fetch("/openapi.json")).json();
const schemas = description.components.schemas;
const views = Object.entries(description.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => operationView(method, path, operation, schemas)),
);
const others = Object.entries(schemas).map(([name, schema]) => schemaView(name, schema));
document
  .getElementById("docs")
  .replaceChildren(element("p", description.info.description), ...views, element("h2", "Schemas"), ...others);
