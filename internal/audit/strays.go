package audit

import (
	"net"
	"net/netip"
	"time"
)

// Bounds of what is written about those whom nobody knows: guesses at tokens
// must not fill the record, nor the memory.
const (
	strayMinute    = time.Minute
	strayEntries   = 5 // of one address in a minute; more are counted
	strayAddresses = 1024
)

// actionAudio is the action of refused frames of speech.
const actionAudio = "audio"

// isStray tells whether an entry is about a refusal of somebody without a key,
// or of a frame of speech, of which there are some twenty a second.
func (e *Entry) isStray() bool {
	if e.Kind == KindRefusal && e.Action == actionAudio {
		return true
	}
	return e.Key == "" && (e.Kind == KindRefusal || e.Kind == KindCall || e.Kind == KindMessage)
}

// strays counts refusals by address.
type strays struct{ by map[string]*stray }

type stray struct {
	begun time.Time
	seen  int
	last  Entry
}

// admit tells whether to write the entry.
func (s *strays) admit(e *Entry, now time.Time) bool {
	if s.by == nil {
		s.by = map[string]*stray{}
	}
	at := strayAddress(e.From)
	one := s.by[at]
	if one == nil && len(s.by) >= strayAddresses {
		at = "" // many at once are counted as one
		one = s.by[at]
	}
	if one == nil {
		one = &stray{begun: now}
		s.by[at] = one
	}
	one.seen++
	one.last = *e
	one.last.From = at
	return one.seen <= strayEntries
}

// due ends the minutes that are over, all with the zero time, and returns what
// was not written in them.
func (s *strays) due(now time.Time) (out []Entry) {
	for at, one := range s.by {
		if !now.IsZero() && now.Sub(one.begun) < strayMinute {
			continue
		}
		if more := one.seen - strayEntries; more > 0 {
			e := one.last
			e.Count, e.Arguments, e.Digest = int64(more), nil, Hash{}
			e.Detail = "so many more refusals of this address within a minute, of which this is the last"
			out = append(out, e)
		}
		delete(s.by, at)
	}
	return out
}

// strayAddress is where a peer is: an IPv4 address, or the /64 that one
// customer has.
func strayAddress(from string) string {
	host, _, err := net.SplitHostPort(from)
	if err != nil {
		host = from
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host[:min(len(host), maxText)]
	}
	if ip = ip.Unmap(); ip.Is6() {
		if prefix, err := ip.WithZone("").Prefix(64); err == nil {
			return prefix.String()
		}
	}
	return ip.String()
}
