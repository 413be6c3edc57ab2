package fleet

import (
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Stats counts what the core does. A collector reads it at any time.
type Stats struct {
	*speech.AudioStats
	*session.Stats
	*dispatch.Counters
}
