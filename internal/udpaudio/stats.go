package udpaudio

import "sync/atomic"

// Verdict is what became of one received datagram.
type Verdict uint8

// Verdicts. Every datagram gets exactly one.
const (
	Accepted    Verdict = iota // handed to the Receiver at once
	Held                       // plausible, from an address that is not proven yet; handed over or discarded later
	Short                      // under 16 bytes, or empty
	BadType                    // first byte is not 1
	BadFlags                   // flags of another direction: a reflected downlink packet
	BadLength                  // length field does not match
	TooLong                    // over MaxPayload
	Empty                      // no Opus
	UnknownSSRC                // no such channel, or closed
	Replayed                   // sequence was taken before
	Old                        // below the replay window, or 0
	Jump                       // sequence too far ahead to be believed from one packet; held like Held
	Implausible                // decrypts to something that the device would not say
	Foreign                    // from another address while the proven one is alive, not even decrypted
	Verdicts                   // number of verdicts
)

var verdictNames = [Verdicts]string{
	"accepted", "held", "short", "bad_type", "bad_flags", "bad_length", "too_long", "empty",
	"unknown_ssrc", "replayed", "old", "jump", "implausible", "foreign",
}

// String returns the name for metrics.
func (v Verdict) String() string {
	if v >= Verdicts {
		return "unknown"
	}
	return verdictNames[v]
}

// Stats are the counters of a Table. Read them at any time.
type Stats struct {
	packets [Verdicts]atomic.Uint64

	Channels   atomic.Int64  // open now
	Released   atomic.Uint64 // held frames handed to the Receiver
	Discarded  atomic.Uint64 // held frames thrown away
	Confirmed  atomic.Uint64 // addresses proven, the first of a channel and later ones
	Moves      atomic.Uint64 // proven addresses that replaced another
	Silent     atomic.Uint64 // calls of Receiver.Silent
	Sent       atomic.Uint64 // packets given to the socket
	SendErrors atomic.Uint64 // packets the socket refused: ENOBUFS, EAGAIN, ICMP errors
	ReadErrors atomic.Uint64
}

// Packets returns how many datagrams got verdict v.
func (s *Stats) Packets(v Verdict) uint64 { return s.packets[v].Load() }
