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
	gatewayTopic = "device-server"
)

// isTopicUp is `string(topic) == devices.TopicUp(id)` without an allocation.
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
	remote  netip.Addr // zero for devices of a broker
	session atomic.Pointer[session.Session]

	helloAt  time.Time // start of the second in which hellos are counted
	hellos   int
	badCount int
	meter    connlimit.Meter
}

func (l *link) prepare(v *voice, id devices.ID, remote string) {
	l.voice, l.device = v, id
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		l.remote = addr.Addr().Unmap()
	}
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
