package mqttdevice

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
	"fleetd/internal/lobby"
	"fleetd/internal/udpaudio"
)

// Topics. Devices publish to their own, and take whatever comes on their
// connection; the topic down is for those that subscribe (py-xiaozhi, or a
// broker on their behalf). `<d>` is the id without colons.
const (
	topicRoot    = "fleetd/"
	topicUp      = "/up"
	gatewayTopic = "device-server"
)

// isTopicUp is `string(topic) == devices.TopicUp(id)` without making it.
func isTopicUp(topic []byte, id devices.ID) bool {
	if !bytes.HasPrefix(topic, []byte(topicRoot)) || !bytes.HasSuffix(topic, []byte(topicUp)) || len(topic) < len(topicRoot)+len(topicUp) {
		return false
	}
	token := topic[len(topicRoot) : len(topic)-len(topicUp)]
	i := 0
	for _, c := range []byte(id) {
		if c == ':' {
			continue
		}
		if i == len(token) || token[i] != c {
			return false
		}
		i++
	}
	return i == len(token)
}

// checkTopic refuses what nobody may publish to (MQTT 3.1.1, sections 3.3.2
// and 4.7).
func checkTopic(topic []byte) error {
	if len(topic) == 0 || bytes.ContainsAny(topic, "+#\x00") || !utf8.Valid(topic) {
		return fmt.Errorf("topic %.80q: it must not be empty nor have wildcards", topic)
	}
	return nil
}

// voice opens audio channels for the devices of either source.
type voice struct {
	udp     *udpaudio.Table
	server  string
	port    uint16
	stats   *Stats
	service *fleet.Service
	log     *slog.Logger
}

// link is one device, whichever source it came by.
type link struct {
	*voice
	device  devices.ID
	remote  netip.Addr // zero behind a broker
	session atomic.Pointer[session.Session]

	helloAt time.Time // beginning of the second in which hellos are counted
	hellos  int
	bad     int
	meter   lobby.Meter
}

func (l *link) prepare(v *voice, id devices.ID, remote string) {
	l.voice, l.device = v, id
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		l.remote = addr.Addr().Unmap()
	}
}

// receive takes one message of the device. An error ends the connection; an
// unusable message does not, until there have been MaxBad.
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
	if l.bad++; l.bad == 1 || l.bad == MaxBad {
		l.log.Debug("unusable message", "device", l.device, "count", l.bad, "error", err)
	}
	if l.bad >= MaxBad {
		return errTooBad
	}
	return nil
}

// hello opens a conversation, or replaces the one that is open: the firmware
// says hello again without a goodbye (mqtt_protocol.cc:239-252). Each has a key
// of its own, since a repeated one would repeat its keystream.
func (l *link) hello(msg []byte) error {
	begun := time.Now()
	h, err := hello.ParseDevice(msg)
	if err == nil && h.Transport == hello.TransportWebSocket {
		err = errors.New("hello for another transport over MQTT")
	}
	if err != nil {
		return err
	}
	if begun.Sub(l.helloAt) >= time.Second {
		l.helloAt, l.hellos = begun, 0
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
			Channels: h.Audio.Channels, Remote: l.remote, Receiver: c})
		return channel, err
	})
	if err != nil {
		l.log.Warn("no audio channel", "device", l.device, "error", err)
		return err
	}
	reply.UDP = &hello.UDP{Server: l.server, Port: l.port, Key: channel.Key(), Nonce: channel.Nonce()}
	answer, err := reply.Append(nil)
	if err == nil {
		err = session.Answer(answer)
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

// deviceOfTopic reads `fleetd/<d>/<leaf>`.
func deviceOfTopic(topic string) (id devices.ID, leaf string, err error) {
	token, leaf, found := strings.Cut(strings.TrimPrefix(topic, topicRoot), "/")
	if !found || !strings.HasPrefix(topic, topicRoot) {
		return "", "", fmt.Errorf("topic %.80q has not the form %s<device>/<name>", topic, topicRoot)
	}
	id, err = devices.ParseID(token)
	if err == nil && id.Token() != token {
		err = fmt.Errorf("topic %.80q does not name the device as %s", topic, id.Token())
	}
	return id, leaf, err
}
