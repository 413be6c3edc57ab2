package fleet

import (
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Stats are the counters of the core. They may be read at any time.
type Stats struct {
	*speech.AudioStats
	*session.Stats
	*dispatch.Counters
}
