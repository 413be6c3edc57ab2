package devices

import (
	"context"
	"time"
)

// StreamLimits are the limits of a JetStream stream.
type StreamLimits struct {
	MaxAge   time.Duration `json:"max_age"`
	MaxBytes int64         `json:"max_bytes"`
	Replicas int           `json:"replicas"`
}

// Max returns the larger of each limit. Nodes with different settings share a stream: it has the largest limits that one
// of them asks for, so that a node which starts with smaller ones deletes nothing.
func (l StreamLimits) Max(o StreamLimits) StreamLimits {
	return StreamLimits{MaxAge: max(l.MaxAge, o.MaxAge), MaxBytes: max(l.MaxBytes, o.MaxBytes), Replicas: max(l.Replicas, o.Replicas)}
}

// OthersLimits returns the largest limits that the other live nodes ask for, by name of the stream. complete is false if
// a node did not answer.
type OthersLimits func(ctx context.Context) (limits map[string]StreamLimits, complete bool)

// Alone is OthersLimits of a node whose streams nobody else can reach.
var Alone OthersLimits = func(context.Context) (map[string]StreamLimits, bool) { return nil, true }

// Agreed returns the limits that a stream is to have. While a node is silent, the present limits are not reduced.
func (ask OthersLimits) Agreed(ctx context.Context, stream string, own, present StreamLimits) StreamLimits {
	limits, complete := ask(ctx)
	own = own.Max(limits[stream])
	if !complete {
		own = own.Max(present)
	}
	return own
}
