package fleet

import (
	"sync/atomic"

	"fleetd/internal/counters"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Stats counts what the core does. A collector reads it at any time.
type Stats struct {
	*speech.AudioStats
	*session.Stats

	SharedCalls atomic.Uint64        // calls of readers answered with another's answer
	LateAnswers atomic.Uint64        // handed to who waited for them after the caller had left
	Calls       counters.Map[string] // by outcome: ok, tool_error or an error code
	CallTime    counters.Histogram
}
