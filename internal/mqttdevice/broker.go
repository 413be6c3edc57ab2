package mqttdevice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/tasks"
	"fleetd/internal/writequeue"
)

// Limits of a Broker.
const (
	handlers       = 16  // goroutines that handle messages; each device's messages are handled by the same one
	inboxLimit     = 256 // messages queued for one of them; at the limit, the broker waits
	maxBrokerConns = 100_000
	publishTimeout = 5 * time.Second
	connectRetry   = 2 * time.Second
	stopQuiesce    = 250 // ms for messages that are being published
	firstAttempt   = 3 * time.Second
)

// Topics to which a broker may publish when a client connects or disconnects (docs/howto/emqx.md).
const (
	leafUp           = "up"
	leafConnected    = "connected"
	leafDisconnected = "disconnected"
)

// Broker is the second source of MQTT devices: an external broker that subscribes on
// their behalf, or whose devices subscribe themselves. A session opens at a device's
// first message, or when the broker reports that the device has connected. It ends
// when the broker reports that the device has disconnected, or after one and a half
// keepalives of silence and a probe without a response. The broker checks credentials
// by `POST /v1/mqtt/authenticate`, and restricts each device to its topics.
type Broker struct {
	opt         Options
	url         string
	keep        time.Duration
	client      paho.Client
	voice       *voice
	stats       Stats
	seed        maphash.Seed
	inbox       [handlers]chan paho.Message
	up          atomic.Bool
	firstResult chan error // the result of the first attempt to connect

	mu        sync.Mutex
	lastError string // why the broker is not connected, as last logged
	conns     map[devices.ID]*brokerConn
	// generations contains the generation of the credentials that a client presented
	// when the broker last authenticated it. A device that was revoked since then is
	// refused, even on the connection that it still has to the broker.
	generations map[devices.ID]int64
	ctx         context.Context
	stop        context.CancelFunc
	tasks       sync.WaitGroup
}

// NewBroker connects to the broker at address (tcp:// or ssl://, may contain user
// info). It returns an error if the broker refuses the login. If the broker is
// unreachable, it continues to try without limit. clientID must be unique to the node;
// keepalive is the one configured on devices.
func NewBroker(opt Options, address, clientID string, keepalive time.Duration) (*Broker, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("broker address: %w", err)
	}
	b := &Broker{opt: opt, url: u.Redacted(), keep: keepalive * 3 / 2, seed: maphash.MakeSeed(), firstResult: make(chan error, 1),
		conns: map[devices.ID]*brokerConn{}, generations: map[devices.ID]int64{}}
	for i := range b.inbox {
		b.inbox[i] = make(chan paho.Message, inboxLimit)
	}
	b.voice = opt.voice(&b.stats)
	b.ctx, b.stop = context.WithCancel(context.Background())
	options := paho.NewClientOptions().AddBroker(u.Scheme + "://" + u.Host).SetClientID(clientID).SetProtocolVersion(4).
		SetConnectRetry(true).SetConnectRetryInterval(connectRetry).SetMaxReconnectInterval(connectRetry * 5).SetKeepAlive(10 * time.Second).
		SetWriteTimeout(publishTimeout).SetOrderMatters(true).SetOnConnectHandler(b.onConnect).SetConnectionLostHandler(b.onLost).
		SetConnectionNotificationHandler(b.onNotification)
	if u.User != nil {
		options.SetUsername(u.User.Username())
		if password, given := u.User.Password(); given {
			options.SetPassword(password)
		}
	}
	b.client = paho.NewClient(options)
	b.client.Connect() // retries without limit; b.connected subscribes
	for _, inbox := range b.inbox {
		b.tasks.Go(func() { b.handleInbox(inbox) })
	}
	b.tasks.Go(b.sweep)
	select {
	case err := <-b.firstResult:
		if isRefusal(err) {
			b.Close()
			return nil, fmt.Errorf("the broker at %s refuses fleetd's login; check the user and password in its address: %w", b.url, err)
		}
	case <-time.After(firstAttempt):
	}
	return b, nil
}

// isRefusal reports whether the broker refused the login; other errors may be temporary.
func isRefusal(err error) bool {
	for _, refusal := range []error{packets.ErrorRefusedBadProtocolVersion, packets.ErrorRefusedIDRejected,
		packets.ErrorRefusedBadUsernameOrPassword, packets.ErrorRefusedNotAuthorised} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

// onNotification logs once why the broker is not connected, until the reason changes.
func (b *Broker) onNotification(_ paho.Client, n paho.ConnectionNotification) {
	var err error
	switch n := n.(type) {
	case paho.ConnectionNotificationFailed:
		err = n.Reason
	case paho.ConnectionNotificationBrokerFailed:
		err = n.Reason
	default:
		return
	}
	if err == nil {
		return
	}
	select {
	case b.firstResult <- err:
	default: // the first result is already there
	}
	b.mu.Lock()
	logged := b.lastError == err.Error()
	b.lastError = err.Error()
	b.mu.Unlock()
	if !logged {
		b.opt.Log.Warn("cannot connect to the MQTT broker; trying again", "broker", b.url, "error", err)
	}
}

// Stats returns the counters.
func (b *Broker) Stats() *Stats { return &b.stats }

// Up reports whether the broker is connected.
func (b *Broker) Up() bool { return b.up.Load() }

func (b *Broker) onConnect(c paho.Client) {
	b.opt.Log.Info("MQTT broker connected", "broker", b.url)
	select {
	case b.firstResult <- nil:
	default:
	}
	b.mu.Lock()
	b.lastError = ""
	b.mu.Unlock()
	topics := map[string]byte{}
	for _, leaf := range []string{leafUp, leafConnected, leafDisconnected} {
		topics[topicRoot+"+/"+leaf] = 0
	}
	token := c.SubscribeMultiple(topics, func(_ paho.Client, m paho.Message) {
		token, _, _ := strings.Cut(strings.TrimPrefix(m.Topic(), topicRoot), "/")
		select {
		case b.inbox[maphash.String(b.seed, token)%handlers] <- m:
		case <-b.ctx.Done():
		}
	})
	b.tasks.Go(func() {
		select {
		case <-token.Done():
		case <-b.ctx.Done():
			return
		}
		if err := subscriptionError(token); err != nil {
			b.opt.Log.Error("MQTT broker refuses the subscription to devices' topics; see docs/howto/emqx.md", "broker", b.url, "error", err)
			return
		}
		b.up.Store(true)
	})
}

// subscriptionError checks SUBACK, whose refusals the token does not report as an error.
func subscriptionError(token paho.Token) error {
	if err := token.Error(); err != nil {
		return err
	}
	if t, ok := token.(*paho.SubscribeToken); ok {
		for topic, code := range t.Result() {
			if code == 0x80 {
				return fmt.Errorf("%s is refused", topic)
			}
		}
	}
	return nil
}

func (b *Broker) onLost(_ paho.Client, err error) {
	b.up.Store(false)
	b.opt.Log.Warn("connection to the MQTT broker lost; its devices are unreachable until it is restored", "broker", b.url, "error", err)
}

// take handles the messages of an inbox in order.
func (b *Broker) handleInbox(inbox chan paho.Message) {
	for {
		select {
		case <-b.ctx.Done():
			return
		case m := <-inbox:
			b.handleMessage(m.Topic(), m.Payload())
		}
	}
}

func (b *Broker) handleMessage(topic string, payload []byte) {
	defer tasks.Contain(b.opt.Log, nil)
	id, leaf, err := deviceOfTopic(topic)
	if err != nil {
		b.stats.ForeignTopics.Add(1)
		return
	}
	if leaf == leafDisconnected {
		if c := b.get(id); c != nil {
			c.session.Load().Close(devices.CloseGone)
		}
		return
	}
	if leaf == leafConnected {
		b.forget(id) // another connection of the device: the state of the old one is void
	}
	c, err := b.ensure(id)
	if err != nil {
		b.opt.Log.Debug("device of the MQTT broker refused", "device", id, "error", err)
		b.stats.Connacks.Add("refused", 1)
		return
	}
	c.lastReceived.Store(clock.Reading(time.Now()))
	if leaf == leafConnected {
		return
	}
	if len(payload) > PacketLimit {
		b.opt.Service.Stats().BadMessages.Add(1)
		return
	}
	session := c.session.Load()
	asked := session.AnswerCount()
	reason := devices.CloseProtocol
	c.handling.Store(true)
	err = c.receive(payload)
	c.handling.Store(false)
	if err == nil && session.AnswerCount() == asked { // messages of a broker cannot be delayed, so the pause is ignored
		_, err = c.meter.Count(b.opt.Floods, connlimit.CostMessage, time.Now())
	}
	if errors.Is(err, connlimit.ErrFlood) {
		b.opt.Floods.Block(string(id), time.Now())
		reason = devices.CloseFlooding
	}
	if err != nil {
		session.Close(reason)
	}
}

// forget makes the device's next message open a session, which replaces the existing
// one.
func (b *Broker) forget(id devices.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conns, id)
}

func (b *Broker) get(id devices.ID) *brokerConn {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.conns[id]
}

// ensure returns the device's connection, or opens one. It is called only by the
// goroutine that handles the device's messages.
func (b *Broker) ensure(id devices.ID) (*brokerConn, error) {
	if c := b.get(id); c != nil {
		return c, nil
	}
	if b.opt.Floods.Blocked(string(id), time.Now()) > 0 {
		return nil, errBlocked
	}
	generation, known := b.opt.Service.OldestGeneration(id)
	ctx, cancel := context.WithTimeout(b.ctx, session.LookupTimeout)
	client := b.opt.Service.ClientOf(ctx, id)
	cancel()
	if !b.opt.Open && (!known || !b.opt.Service.IsMember(id)) {
		return nil, errNotMember
	}
	b.mu.Lock()
	proven, asked := b.generations[id]
	b.mu.Unlock()
	if asked {
		if !b.opt.Service.Accepts(id, proven) {
			return nil, errOutdated
		}
		generation = proven
	}
	c := &brokerConn{broker: b, topic: devices.TopicDown(id)}
	c.voice, c.device = b.voice, id
	session, err := b.opt.Service.Accept(devices.Identity{Device: id, ClientID: client, Transport: devices.TransportMQTT, Remote: b.url,
		Verified: !b.opt.Open, Generation: generation}, c)
	if err != nil {
		return nil, err
	}
	c.session.Store(session)
	b.stats.Connacks.Add("0", 1)
	b.mu.Lock()
	full := len(b.conns) >= maxBrokerConns
	if !full && !c.closed.Load() { // else it was revoked or replaced in the meantime
		b.conns[id] = c
	}
	b.mu.Unlock()
	if full {
		session.Close(devices.CloseInternal)
		return nil, fmt.Errorf("the limit of %d devices is reached", maxBrokerConns)
	}
	session.StartMCP(devices.FeaturesUnknown)
	return c, nil
}

// sweep probes devices that were silent for too long, since a broker need not report
// the end of their connections.
func (b *Broker) sweep() {
	for now := range clock.Ticks(b.ctx, sweepEvery) {
		b.mu.Lock()
		var silent []*brokerConn
		for _, c := range b.conns {
			if clock.Reading(now)-c.lastReceived.Load() > int64(b.keep) && c.probing.CompareAndSwap(false, true) {
				silent = append(silent, c)
			}
		}
		b.mu.Unlock()
		for _, c := range silent {
			b.tasks.Go(c.probe)
		}
	}
}

// Close closes the connection to the broker. The fleet.Service has closed the sessions
// before.
func (b *Broker) Close() {
	b.stop()
	b.client.Disconnect(stopQuiesce)
	b.tasks.Wait()
}

// brokerConn is a device that is connected to the broker. It is the fleet.Conn of its
// session.
type brokerConn struct {
	link
	broker       *Broker
	topic        string
	lastReceived atomic.Int64 // as clock.Reading
	probing      atomic.Bool
	closed       atomic.Bool
	handling     atomic.Bool // a message of the device is being handled
	out          writequeue.Queue
}

var errBrokerAway = errors.New("the MQTT broker is not connected")

// SendControl publishes msg to the device. See fleet.Conn.
func (c *brokerConn) SendControl(msg []byte) error {
	if c.closed.Load() || !c.broker.up.Load() {
		return errBrokerAway
	}
	send := c.out.Send
	if c.handling.Load() { // the handling goroutine also serves other devices, so it must not wait
		send = c.out.Enqueue
	}
	return send(c, 0, msg, QueueLimit)
}

// Write implements writequeue.Writer. It waits at most for publishTimeout if the broker
// does not read. A lost message does not stop the following ones.
func (c *brokerConn) Write(_ int, msg []byte) error {
	token := c.broker.client.Publish(c.topic, 0, false, bytes.Clone(msg))
	select {
	case <-token.Done():
		if token.Error() != nil {
			c.broker.stats.Unpublished.Add(1)
		}
	default: // queued in the client library
	}
	return nil
}

// Go implements writequeue.Writer.
func (c *brokerConn) Go(task func()) { c.broker.tasks.Go(task) }

// Close removes the device until its next message.
func (c *brokerConn) Close(devices.CloseReason) {
	if c.closed.Swap(true) {
		return
	}
	c.out.Close()
	b := c.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conns[c.device] == c {
		delete(b.conns, c.device)
	}
}

// probe checks whether the device is connected, by a request that every MCP device
// answers with an error (mcp_server.cc:429-432).
func (c *brokerConn) probe() {
	defer c.probing.Store(false)
	ctx, cancel := context.WithTimeout(c.broker.ctx, c.broker.keep)
	defer cancel()
	if c.session.Load().IsAlive(ctx) {
		return // the response arrived as a message
	}
	if c.broker.ctx.Err() == nil {
		c.session.Load().Close(devices.CloseDead)
	}
}

// Authenticate checks the credentials of a client of the broker.
func (b *Broker) Authenticate(clientID, username, password string) error {
	who, _, err := b.opt.login(clientID, username, password)
	if err != nil || !who.Verified {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.generations[who.Device]; known || len(b.generations) < maxBrokerConns {
		b.generations[who.Device] = who.Generation
	}
	return nil
}

var errOutdated = errors.New("the device's credentials were revoked; close its connection to the broker")
