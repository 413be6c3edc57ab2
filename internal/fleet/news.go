package fleet

import (
	"time"

	"fleetd/internal/devices"
)

// Learn takes another node's news: of what lives in memory alone. Nothing is
// written.
func (s *Service) Learn(n devices.News) {
	if c := n.Spoken; c != nil {
		s.pending.learn(c, time.Now()) // its life is counted by our own clock
	}
	if n.Disputed != nil {
		s.dispute(n.Disputed.Device, time.Now())
	}
}
