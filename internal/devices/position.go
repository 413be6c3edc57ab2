package devices

import (
	"errors"
	"strconv"
	"strings"
)

// EventStream is one of the streams that keep events.
type EventStream int

// The streams, in the order in which a position names them. Notifications have
// one of their own, so that a device that sends many pushes no other event out.
const (
	EventsStream EventStream = iota
	NotificationsStream
	EventStreams int = iota
)

func (s EventStream) String() string {
	return [...]string{"events", "notifications"}[s]
}

// EventPosition is how far a reader has come: the sequence of the last event
// that it has from each stream, 0 where it has none.
type EventPosition [EventStreams]uint64

var errPosition = errors.New("not an event id")

// ParseEventPosition reads what String writes. A number alone is a position in
// the first stream, which once was the only one.
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

// String is the sequences with dots between, without zeros at the end: `1042.77`,
// `1042`, `0.77`; empty for none.
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
