package events

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

// Follow calls deliver for every stored event that q selects: those behind
// q.After, then new ones as they come, until ctx ends or deliver fails. If
// events behind q.After are gone, it begins with one Gap. It fails with
// CodeUnavailable if NATS does not answer.
func (b *Bus) Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error {
	setup, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	if !b.opt.Conn.IsConnected() {
		return unavailable(errors.New("not connected"))
	}
	stream, err := b.stream.js.Stream(setup, b.stream.cfg.Name)
	if err != nil {
		return unavailable(err)
	}
	cfg := jetstream.OrderedConsumerConfig{FilterSubjects: b.filter(q), DeliverPolicy: jetstream.DeliverNewPolicy,
		InactiveThreshold: time.Minute}
	if q.After > 0 {
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, q.After+1
		if gap, ok := gapOf(stream.CachedInfo().State, q.After); ok {
			if err := deliver(gap); err != nil {
				return err
			}
		}
	}
	consumer, err := stream.OrderedConsumer(setup, cfg)
	if err != nil {
		return unavailable(err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(64))
	if err != nil {
		return unavailable(err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, messages.Stop)()
	for {
		msg, err := messages.Next()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return unavailable(err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("events: %w", err)
		}
		if err := deliver(b.read(msg, meta.Sequence.Stream)); err != nil {
			return err
		}
	}
}

func unavailable(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the event stream does not answer: " + err.Error()}
}

// filter is the subject of the events that q selects. It is one, since servers
// before 2.10 take no more, and may be wider than the stream, which holds
// nothing else.
func (b *Bus) filter(q devices.EventQuery) []string {
	device := "*"
	if q.Device != "" {
		device = q.Device.Token()
	}
	switch q.Kind {
	case "":
		return []string{b.opt.Prefix + ".devices." + device + ".>"}
	case devices.EventNotification:
		return []string{b.subject(device, q.Kind, ">")}
	}
	return []string{b.subject(device, q.Kind, "")}
}

// gapOf tells which events after a sequence are gone. A sequence ahead of the
// stream is of a stream that no longer exists.
func gapOf(state jetstream.StreamState, after uint64) (devices.StreamEvent, bool) {
	from, to := after+1, state.FirstSeq-1
	switch {
	case after > state.LastSeq:
		from, to = 1, state.LastSeq
	case from >= state.FirstSeq:
		return devices.StreamEvent{}, false
	}
	return devices.StreamEvent{Gap: true, Seq: to, Data: json.RawMessage(fmt.Sprintf(`{"from":%d,"to":%d}`, from, to))}, true
}

func (b *Bus) read(msg jetstream.Msg, seq uint64) devices.StreamEvent {
	tokens := strings.SplitN(strings.TrimPrefix(msg.Subject(), b.opt.Prefix+".devices."), ".", 3)
	e := devices.StreamEvent{Seq: seq, Data: msg.Data()}
	if id, err := devices.ParseID(tokens[0]); err == nil {
		e.Device = id
	}
	if len(tokens) > 1 {
		e.Kind = devices.EventKind(tokens[1])
	}
	return e
}
