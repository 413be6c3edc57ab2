package udpaudio

import "sync/atomic"

// Verdict is the result of one received datagram.
type Verdict uint8

// Verdicts. Every datagram gets exactly one.
const (
	Accepted    Verdict = iota // delivered to the Receiver at once
	Held                       // plausible, from an address that is not proven yet; delivered or discarded later
	Short                      // under 16 bytes, or empty
	BadType                    // first byte is not 1
	BadFlags                   // flags of the other direction: a reflected downlink packet
	BadLength                  // length field does not match
	TooLong                    // over MaxPayload
	Empty                      // no Opus packet
	UnknownSSRC                // unknown or closed channel
	Replayed                   // sequence number was accepted before
	Old                        // below the replay window, or 0
	Jump                       // sequence number too far ahead for a single packet; held like Held
	Implausible                // decrypts to something that the device would not send
	Foreign                    // from another address while the proven one is alive; not decrypted
	Verdicts                   // number of verdicts
)

var verdictNames = [Verdicts]string{
	"accepted", "held", "short", "bad_type", "bad_flags", "bad_length", "too_long", "empty",
	"unknown_ssrc", "replayed", "old", "jump", "implausible", "foreign",
}

// String returns the name for metrics.
func (v Verdict) String() string { return verdictNames[v] }

// Stats contains the counters of a Table. They can be read at any time.
type Stats struct {
	packets [Verdicts]atomic.Uint64

	Channels   atomic.Int64  // open now
	Released   atomic.Uint64 // held frames delivered to the Receiver
	Discarded  atomic.Uint64 // held frames dropped
	Moves      atomic.Uint64 // proven addresses that replaced another
	Sent       atomic.Uint64 // packets written to the socket
	SendErrors atomic.Uint64 // packets that the socket refused: ENOBUFS, EAGAIN, ICMP errors
	ReadErrors atomic.Uint64
}

// Packets returns the number of datagrams with verdict v.
func (s *Stats) Packets(v Verdict) uint64 { return s.packets[v].Load() }
