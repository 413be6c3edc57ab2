package dispatch

import (
	"context"

	"fleetd/internal/devices"
)

// Router forwards requests to the node that holds a device. Its methods return ErrNoHolder
// at once if no node does.
type Router interface {
	// Forward forwards a tool call.
	Forward(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
	// ForwardRPC forwards a raw MCP request.
	ForwardRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
	// ForwardMessage forwards a message other than MCP.
	ForwardMessage(ctx context.Context, m devices.Message) error
	// Query sends a query to the holder, and returns the result of its Service.Answer.
	Query(ctx context.Context, id devices.ID, q devices.Query) ([]byte, error)
}

// Admission reports whether a device is pending approval.
type Admission interface {
	IsPending(id devices.ID) bool
}
