package devices

import (
	"errors"
	"strconv"
	"strings"
)

// EventStream is one of the streams that keep events.
type EventStream int

// The streams, in the order of an EventPosition. Notifications have a stream of their
// own, so that a device that sends many does not displace other events, and so have jobs
// and their tasks.
const (
	EventsStream EventStream = iota
	NotificationsStream
	JobsStream
	EventStreams int = iota
)

func (s EventStream) String() string {
	return [...]string{"events", "notifications", "jobs"}[s]
}

// EventPosition is the position of a reader: the sequence of the last event that it
// received from each stream, 0 for none.
type EventPosition [EventStreams]uint64

var errPosition = errors.New("not an event id")

// ParseEventPosition parses the result of String. Missing numbers are 0.
func ParseEventPosition(s string) (p EventPosition, err error) {
	parts := strings.Split(s, ".")
	if len(parts) > EventStreams {
		return EventPosition{}, errPosition
	}
	for i, part := range parts {
		if p[i], err = strconv.ParseUint(part, 10, 64); err != nil {
			return EventPosition{}, errPosition
		}
	}
	return p, nil
}

// String returns the sequences separated by dots, without zeros at the end: `1042.77.5`,
// `1042.77`, `0.77`; empty for the zero position.
func (p EventPosition) String() string {
	used := len(p)
	for used > 0 && p[used-1] == 0 {
		used--
	}
	var out []byte
	for i, seq := range p[:used] {
		if i > 0 {
			out = append(out, '.')
		}
		out = strconv.AppendUint(out, seq, 10)
	}
	return string(out)
}
