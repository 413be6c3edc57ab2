package cluster

import (
	"sync"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// shares divides the MaxServing places between callers: one may have as many as
// it leaves free, so that a key whose calls wait for silent devices takes half of
// them, the next such key half of the rest, and somebody else still finds one.
// NATS does not tell when a caller is gone; its calls keep their places until
// they time out.
type shares struct {
	mu    sync.Mutex
	total int
	byKey map[string]int
}

// take counts a request of the caller in; false if it has its share.
func (s *shares) take(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own := s.byKey[key]; own > 0 && own >= MaxServing-s.total {
		return false
	}
	if s.byKey == nil {
		s.byKey = map[string]int{}
	}
	s.total++
	s.byKey[key]++
	return true
}

func (s *shares) free(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.byKey[key]--; s.byKey[key] == 0 {
		delete(s.byKey, key)
	}
}

// enter takes a place for a request of the caller until leave is called.
func (l *Link) enter(who *access.Caller) (leave func(), refusal *devices.Error) {
	if !l.shares.take(who.Key) {
		l.OverShare.Add(1)
		return nil, &devices.Error{Code: devices.CodeDeviceBusy,
			Detail: "this caller has as many requests in progress on the device's node as are left for others; wait for their answers"}
	}
	select {
	case l.serving <- struct{}{}:
		return func() {
			<-l.serving
			l.shares.free(who.Key)
		}, nil
	default:
		l.shares.free(who.Key)
		return nil, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "too many requests are being served"}
	}
}
