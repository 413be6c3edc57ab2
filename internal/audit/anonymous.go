package audit

import (
	"net"
	"net/netip"
	"time"
)

// Limits of entries about unauthenticated callers: guesses at tokens must fill neither the log nor the
// memory.
const (
	anonymousWindow    = time.Minute
	anonymousEntries   = 5 // of one address in a minute; more are counted
	anonymousAddresses = 1024
)

// actionAudio is the action of refused audio frames.
const actionAudio = "audio"

// isAnonymous reports whether an entry is about a refusal of a caller without a key, or of an audio
// frame, of which there are about twenty a second.
func (e *Entry) isAnonymous() bool {
	if e.Kind == KindRefusal && e.Action == actionAudio {
		return true
	}
	return e.Key == "" && (e.Kind == KindRefusal || e.Kind == KindCall || e.Kind == KindMessage)
}

// anonymousLimiter counts refusals by address.
type anonymousLimiter struct{ by map[string]*anonymousCount }

type anonymousCount struct {
	begun time.Time
	seen  int
	last  Entry
}

// admit reports whether to write the entry.
func (s *anonymousLimiter) admit(e *Entry, now time.Time) bool {
	if s.by == nil {
		s.by = map[string]*anonymousCount{}
	}
	at := anonymousAddress(e.From)
	one := s.by[at]
	if one == nil && len(s.by) >= anonymousAddresses {
		at = "" // too many addresses are counted as one
		one = s.by[at]
	}
	if one == nil {
		one = &anonymousCount{begun: now}
		s.by[at] = one
	}
	one.seen++
	one.last = *e
	one.last.From = at
	return one.seen <= anonymousEntries
}

// due ends the minutes that are over, or all for the zero time, and returns entries with the counts of
// what was not written.
func (s *anonymousLimiter) due(now time.Time) (out []Entry) {
	for at, one := range s.by {
		if !now.IsZero() && now.Sub(one.begun) < anonymousWindow {
			continue
		}
		if more := one.seen - anonymousEntries; more > 0 {
			e := one.last
			e.Count, e.Arguments, e.Digest = int64(more), nil, Hash{}
			e.Detail = "further refusals of this address within a minute; this is the last one"
			out = append(out, e)
		}
		delete(s.by, at)
	}
	return out
}

// anonymousAddress returns the address to count by: an IPv4 address, or an IPv6 /64 network.
// customer has.
func anonymousAddress(from string) string {
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
