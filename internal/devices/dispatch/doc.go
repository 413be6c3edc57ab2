// Package dispatch sends requests to devices: calls of tools, raw MCP requests and
// messages. Those of all interfaces pass the same stages:
//
//	authorize, resolve, run here or forward, guard, validate, slot, wire, classify, record
//
// route.go contains the first three stages and the last one, guard.go the rules, call.go
// the others. A request of another node (see Origin) is neither routed nor recorded
// again.
//
// Lock order: rules.mu and callerState.mu are taken alone, and never held during a call.
package dispatch
