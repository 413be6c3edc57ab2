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

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/lobby"
	"fleetd/internal/outbox"
	"fleetd/internal/tasks"
)

// Limits of a Broker.
const (
	takers         = 16  // goroutines that take messages; those of one device have one
	inboxLimit     = 256 // messages waiting for one of them; the broker then waits
	maxBrokerConns = 100_000
	publishTimeout = 5 * time.Second
	connectRetry   = 2 * time.Second
	stopQuiesce    = 250 // ms for what is being published
	firstAttempt   = 3 * time.Second
)

// Topics a broker may publish when a client comes and goes (docs/emqx.md).
const (
	leafUp           = "up"
	leafConnected    = "connected"
	leafDisconnected = "disconnected"
)

// Broker is the second source of MQTT devices: an external broker that
// subscribes on their behalf, or whose devices subscribe themselves. A session
// opens at a device's first message, or when the broker says that it came; it
// ends when the broker says that it left, or after one and a half keepalives
// of silence and a probe that nobody answers. The broker checks credentials,
// by asking `POST /v1/mqtt/authenticate`, and keeps each device to its topics.
type Broker struct {
	opt    Options
	url    string
	keep   time.Duration
	client paho.Client
	voice  *voice
	stats  Stats
	seed   maphash.Seed
	inbox  [takers]chan paho.Message
	up     atomic.Bool
	first  chan error // how the first attempt to connect ended

	mu      sync.Mutex
	trouble string // why the broker is not connected, as last said
	conns   map[devices.ID]*brokerConn
	// proven is the generation of the credentials that a client presented when
	// the broker last asked: a device that was revoked since is not let in by
	// the connection that it still has to the broker.
	proven map[devices.ID]int64
	ctx    context.Context
	stop   context.CancelFunc
	tasks  sync.WaitGroup
}

// NewBroker connects to the broker at address (tcp:// or ssl://, user info
// allowed). It fails if the broker refuses the login; one that is merely
// unreachable it goes on trying for ever. clientID must be its own on every
// node; keepalive is what devices were told.
func NewBroker(opt Options, address, clientID string, keepalive time.Duration) (*Broker, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("broker address: %w", err)
	}
	b := &Broker{opt: opt, url: u.Redacted(), keep: keepalive * 3 / 2, seed: maphash.MakeSeed(), first: make(chan error, 1),
		conns: map[devices.ID]*brokerConn{}, proven: map[devices.ID]int64{}}
	for i := range b.inbox {
		b.inbox[i] = make(chan paho.Message, inboxLimit)
	}
	b.voice = opt.voice(&b.stats)
	b.ctx, b.stop = context.WithCancel(context.Background())
	options := paho.NewClientOptions().AddBroker(u.Scheme + "://" + u.Host).SetClientID(clientID).SetProtocolVersion(4).
		SetConnectRetry(true).SetConnectRetryInterval(connectRetry).SetMaxReconnectInterval(connectRetry * 5).SetKeepAlive(10 * time.Second).
		SetWriteTimeout(publishTimeout).SetOrderMatters(true).SetOnConnectHandler(b.connected).SetConnectionLostHandler(b.lost).
		SetConnectionNotificationHandler(b.notified)
	if u.User != nil {
		options.SetUsername(u.User.Username())
		if password, given := u.User.Password(); given {
			options.SetPassword(password)
		}
	}
	b.client = paho.NewClient(options)
	b.client.Connect() // retries by itself; b.connected subscribes
	for _, inbox := range b.inbox {
		b.tasks.Go(func() { b.take(inbox) })
	}
	b.tasks.Go(b.sweep)
	select {
	case err := <-b.first:
		if isRefusal(err) {
			b.Close()
			return nil, fmt.Errorf("the broker at %s refuses fleetd's login: %w", b.url, err)
		}
	case <-time.After(firstAttempt):
	}
	return b, nil
}

// isRefusal tells a broker that says no from one that says nothing.
func isRefusal(err error) bool {
	for _, refusal := range []error{packets.ErrorRefusedBadProtocolVersion, packets.ErrorRefusedIDRejected,
		packets.ErrorRefusedBadUsernameOrPassword, packets.ErrorRefusedNotAuthorised} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

// notified says once why the broker is not connected, until that changes.
func (b *Broker) notified(_ paho.Client, n paho.ConnectionNotification) {
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
	case b.first <- err:
	default: // somebody knows already
	}
	b.mu.Lock()
	told := b.trouble == err.Error()
	b.trouble = err.Error()
	b.mu.Unlock()
	if !told {
		b.opt.Log.Warn("MQTT broker does not take fleetd's connection; trying again", "broker", b.url, "error", err)
	}
}

// Stats returns the counters.
func (b *Broker) Stats() *Stats { return &b.stats }

// Up tells whether the broker is connected.
func (b *Broker) Up() bool { return b.up.Load() }

func (b *Broker) connected(c paho.Client) {
	b.opt.Log.Info("MQTT broker connected", "broker", b.url)
	select {
	case b.first <- nil:
	default:
	}
	b.mu.Lock()
	b.trouble = ""
	b.mu.Unlock()
	topics := map[string]byte{}
	for _, leaf := range []string{leafUp, leafConnected, leafDisconnected} {
		topics[topicRoot+"+/"+leaf] = 0
	}
	token := c.SubscribeMultiple(topics, func(_ paho.Client, m paho.Message) {
		token, _, _ := strings.Cut(strings.TrimPrefix(m.Topic(), topicRoot), "/")
		select {
		case b.inbox[maphash.String(b.seed, token)%takers] <- m:
		case <-b.ctx.Done():
		}
	})
	b.tasks.Go(func() {
		select {
		case <-token.Done():
		case <-b.ctx.Done():
			return
		}
		if err := subscribed(token); err != nil {
			b.opt.Log.Error("MQTT broker refuses the subscription to devices' topics; see docs/emqx.md", "broker", b.url, "error", err)
			return
		}
		b.up.Store(true)
	})
}

// subscribed reads SUBACK, where a refusal is no error of the token's.
func subscribed(token paho.Token) error {
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

func (b *Broker) lost(_ paho.Client, err error) {
	b.up.Store(false)
	b.opt.Log.Warn("MQTT broker lost; its devices are unreachable until it is back", "broker", b.url, "error", err)
}

// take hands messages to their devices, in order.
func (b *Broker) take(inbox chan paho.Message) {
	for {
		select {
		case <-b.ctx.Done():
			return
		case m := <-inbox:
			b.message(m.Topic(), m.Payload())
		}
	}
}

func (b *Broker) message(topic string, payload []byte) {
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
		b.forget(id) // another connection of the device: what the old one knew is gone
	}
	c, err := b.ensure(id)
	if err != nil {
		b.opt.Log.Debug("device behind the broker not accepted", "device", id, "error", err)
		b.stats.Connacks.Add("refused", 1)
		return
	}
	c.heard.Store(time.Now().UnixNano())
	if leaf == leafConnected {
		return
	}
	if len(payload) > PacketLimit {
		b.opt.Service.Stats().BadMessages.Add(1)
		return
	}
	session := c.session.Load()
	asked := session.Answered()
	reason := devices.CloseProtocol
	c.taken.Store(true)
	err = c.receive(payload)
	c.taken.Store(false)
	if err == nil && session.Answered() == asked { // what comes by a broker cannot wait there
		_, err = c.meter.Note(b.opt.Floods, lobby.CostMessage, time.Now())
	}
	if errors.Is(err, lobby.ErrFlood) {
		b.opt.Floods.Bar(string(id), time.Now())
		reason = devices.CloseFlooding
	}
	if err != nil {
		session.Close(reason)
	}
}

// forget makes the device's next message open a session, which takes the place
// of the one it may have.
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

// ensure returns the device's connection, opened now if there was none. Only
// the goroutine that takes the device's messages calls it.
func (b *Broker) ensure(id devices.ID) (*brokerConn, error) {
	if c := b.get(id); c != nil {
		return c, nil
	}
	if b.opt.Floods.Barred(string(id), time.Now()) > 0 {
		return nil, errFlooded
	}
	generation, known := b.opt.Service.OldestGeneration(id)
	ctx, cancel := context.WithTimeout(b.ctx, session.LookupTimeout)
	client := b.opt.Service.ClientOf(ctx, id)
	cancel()
	if !b.opt.Open && (!known || !b.opt.Service.IsMember(id)) {
		return nil, errOut
	}
	b.mu.Lock()
	proven, asked := b.proven[id]
	b.mu.Unlock()
	if asked {
		if !b.opt.Service.Accepts(id, proven) {
			return nil, errOutdated
		}
		generation = proven
	}
	c := &brokerConn{broker: b, topic: devices.TopicDown(id)}
	c.prepare(b.voice, id, "")
	session, err := b.opt.Service.Accept(devices.Identity{Device: id, ClientID: client, Transport: devices.TransportMQTT, Remote: b.url,
		Verified: !b.opt.Open, Generation: generation}, c)
	if err != nil {
		return nil, err
	}
	c.session.Store(session)
	b.stats.Connacks.Add("0", 1)
	b.mu.Lock()
	full := len(b.conns) >= maxBrokerConns
	if !full && !c.closed.Load() { // else it was revoked or taken over meanwhile
		b.conns[id] = c
	}
	b.mu.Unlock()
	if full {
		session.Close(devices.CloseInternal)
		return nil, fmt.Errorf("%d devices are connected already", maxBrokerConns)
	}
	session.StartMCP(devices.FeaturesUnknown)
	return c, nil
}

// sweep probes devices that were silent too long: nobody tells us when their
// connection to the broker ends.
func (b *Broker) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case now := <-ticker.C:
			b.mu.Lock()
			var silent []*brokerConn
			for _, c := range b.conns {
				if now.UnixNano()-c.heard.Load() > int64(b.keep) && c.probing.CompareAndSwap(false, true) {
					silent = append(silent, c)
				}
			}
			b.mu.Unlock()
			for _, c := range silent {
				b.tasks.Go(c.probe)
			}
		}
	}
}

// Close ends the connection to the broker. Sessions are closed by the
// fleet.Service before.
func (b *Broker) Close() {
	b.stop()
	b.client.Disconnect(stopQuiesce)
	b.tasks.Wait()
}

// brokerConn is a device behind the broker. It is the fleet.Conn of its
// session.
type brokerConn struct {
	link
	broker  *Broker
	topic   string
	heard   atomic.Int64 // unix nanoseconds
	probing atomic.Bool
	closed  atomic.Bool
	taken   atomic.Bool // a message of the device is being taken
	out     outbox.Box
}

var errBrokerAway = errors.New("the MQTT broker is not connected")

// SendControl publishes msg to the device. See fleet.Conn.
func (c *brokerConn) SendControl(msg []byte) error {
	if c.closed.Load() || !c.broker.up.Load() {
		return errBrokerAway
	}
	send := c.out.Send
	if c.taken.Load() { // perhaps from who takes messages of other devices, too
		send = c.out.Queue
	}
	err := send(c, 0, msg, QueueLimit)
	if errors.Is(err, outbox.ErrFull) {
		return devices.ErrOverloaded
	}
	return err
}

// Write implements outbox.Writer. It waits for publishTimeout at most if the broker
// takes nothing; what is lost then leaves the way open for what follows.
func (c *brokerConn) Write(_ int, msg []byte) error {
	token := c.broker.client.Publish(c.topic, 0, false, bytes.Clone(msg))
	select {
	case <-token.Done():
		if token.Error() != nil {
			c.broker.stats.Unpublished.Add(1)
		}
	default: // paho's writer has it
	}
	return nil
}

// Go implements outbox.Writer.
func (c *brokerConn) Go(task func()) { c.broker.tasks.Go(task) }

// Close forgets the device until its next message.
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

// probe asks the device whether it is there, by a request that every MCP
// device answers with an error (mcp_server.cc:429-432).
func (c *brokerConn) probe() {
	defer c.probing.Store(false)
	ctx, cancel := context.WithTimeout(c.broker.ctx, c.broker.keep)
	defer cancel()
	if c.session.Load().Alive(ctx) {
		return // the answer was a message
	}
	if c.broker.ctx.Err() == nil {
		c.session.Load().Close(devices.CloseDead)
	}
}

// Authenticate answers the broker that asks whether a client may come in.
func (b *Broker) Authenticate(clientID, username, password string) error {
	who, _, err := b.opt.login(clientID, username, password)
	if err != nil || !who.Verified {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.proven[who.Device]; known || len(b.proven) < maxBrokerConns {
		b.proven[who.Device] = who.Generation
	}
	return nil
}

var errOutdated = errors.New("the device's credentials were revoked; end its connection to the broker")
