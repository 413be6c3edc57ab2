package mqttdevice

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
	"fleetd/internal/udpaudio"
)

// Topics. Devices publish to their own topic, and accept any topic on their connection;
// the topic down is for clients that subscribe (py-xiaozhi, or a broker on the device's
// behalf). `<d>` is the id without colons.
const (
	topicRoot    = "fleetd/"
	topicUp      = "/up"
	topicDown    = "/down"
	gatewayTopic = "device-server"
)

// appendTopic appends `fleetd/<d><leaf>`; topicSize is enough for the topics of ids that are addresses.
func appendTopic(dst []byte, id devices.ID, leaf string) []byte {
	dst = append(dst, topicRoot...)
	for _, c := range []byte(id) {
		if c != ':' {
			dst = append(dst, c)
		}
	}
	return append(dst, leaf...)
}

const topicSize = len(topicRoot) + 12 + len(topicDown)

// isTopicUp is `string(topic) == devices.TopicUp(id)` without an allocation.
func isTopicUp(topic []byte, id devices.ID) bool {
	var own [topicSize]byte
	return bytes.Equal(topic, appendTopic(own[:0], id, topicUp))
}

// checkTopic refuses topics to which a client must not publish (MQTT 3.1.1, sections
// 3.3.2 and 4.7).
func checkTopic(topic []byte) error {
	if len(topic) == 0 || bytes.ContainsAny(topic, "+#\x00") || !utf8.Valid(topic) {
		return fmt.Errorf("topic %.80q must be UTF-8 text without wildcards, and not empty", topic)
	}
	return nil
}

// voice opens audio channels for devices of both sources.
type voice struct {
	udp     *udpaudio.Table
	server  string
	port    uint16
	stats   *Stats
	service *fleet.Service
	log     *slog.Logger
}

// link is one device of either source.
type link struct {
	*voice
	device  devices.ID
	session atomic.Pointer[session.Session]

	helloAt  int64 // start of the second in which hellos are counted, as clock.Reading
	hellos   int32
	badCount int32
	meter    connlimit.Meter
}

// receive handles one message of the device. An error ends the connection. Unusable
// messages return one only when there have been MaxBad of them.
func (l *link) receive(msg []byte) error {
	err := l.session.Load().HandleControl(msg)
	if errors.Is(err, devices.ErrHello) {
		err = l.hello(msg)
	}
	if err == nil {
		return nil
	}
	return l.unusable(err)
}

func (l *link) unusable(err error) error {
	if l.badCount++; l.badCount == 1 || l.badCount == MaxBad {
		l.log.Debug("unusable message", "device", l.device, "count", l.badCount, "error", err)
	}
	if l.badCount >= MaxBad {
		return errTooManyUnusable
	}
	return nil
}

// hello opens a conversation and replaces an open one: the firmware sends another hello
// without a goodbye (mqtt_protocol.cc:239-252). Each conversation has its own key,
// since a repeated key would repeat the keystream.
func (l *link) hello(msg []byte) error {
	begun := time.Now()
	h, err := hello.ParseDevice(msg)
	if err == nil && h.Transport == hello.TransportWebSocket {
		err = errors.New("hello for another transport over MQTT")
	}
	if err != nil {
		return err
	}
	if at := clock.Reading(begun); at-l.helloAt >= int64(time.Second) {
		l.helloAt, l.hellos = at, 0
	}
	if l.hellos++; l.hellos > MaxHellos {
		l.stats.HelloDrops.Add(1)
		return fmt.Errorf("more than %d hellos in a second", MaxHellos)
	}
	session := l.session.Load()
	var conversation *speech.Conversation
	var channel *udpaudio.Channel
	reply, err := session.OpenAudio(h, hello.TransportUDP, func(c *speech.Conversation) (speech.AudioPath, error) {
		var err error
		conversation = c
		channel, err = l.udp.Open(udpaudio.Params{FrameDuration: time.Duration(h.Audio.FrameDuration) * time.Millisecond,
			Channels: h.Audio.Channels, Remote: session.Remote(), Receiver: c})
		return channel, err
	})
	if err != nil {
		l.log.Warn("no audio channel", "device", l.device, "error", err)
		return err
	}
	reply.UDP = &hello.UDP{Server: l.server, Port: l.port, Key: channel.Key(), Nonce: channel.Nonce()}
	answer, err := reply.Append(nil)
	if err == nil {
		err = session.SendHelloReply(answer)
	}
	if err != nil {
		conversation.End()
		return err
	}
	l.service.Stats().HelloTime.Observe(time.Since(begun))
	session.BeginConversation()
	session.StartMCP(devices.FeaturesOf(h.MCP))
	return nil
}

// deviceOfTopic parses `fleetd/<d>/<leaf>`.
func deviceOfTopic(topic string) (id devices.ID, leaf string, err error) {
	token, leaf, found := strings.Cut(strings.TrimPrefix(topic, topicRoot), "/")
	if !found || !strings.HasPrefix(topic, topicRoot) {
		return "", "", fmt.Errorf("topic %.80q does not have the form %s<device>/<name>", topic, topicRoot)
	}
	id, err = devices.ParseID(token)
	if err == nil && id.Token() != token {
		err = fmt.Errorf("topic %.80q must contain the device id as %s", topic, id.Token())
	}
	return id, leaf, err
}
