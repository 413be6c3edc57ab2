package dispatch

import (
	"context"

	"fleetd/internal/audit"
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

// Auditor records who did what. Record never blocks and never fails; entries that cannot be
// kept leave a visible gap.
type Auditor interface {
	Record(e audit.Entry)
}
