// Package dispatch takes requests to devices: calls of tools, raw MCP requests and
// messages, from every way into the fleet, by one way through it:
//
//	authorize, resolve, here or one hop, guard, validate, slot, wire, classify, record
//
// route.go has the first three and the last stage, guard.go the rules, call.go the
// others. An Origin says where a request came in: a hop is neither routed nor
// recorded once more.
//
// Lock order: rules.mu and callerState.mu are taken alone, and never held during a
// call.
package dispatch
