// The module name of the K8E contract.
export * from "./src/index.js";
