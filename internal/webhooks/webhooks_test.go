package webhooks_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/egress"
	"fleetd/internal/events"
	"fleetd/internal/natstest"
	"fleetd/internal/racetest"
	"fleetd/internal/selector"
	"fleetd/internal/store"
	"fleetd/internal/store/storetest"
	"fleetd/internal/store/webhookstore"
	"fleetd/internal/webhooks"
)

func TestMain(m *testing.M) {
	webhooks.Quicken()
	goleak.VerifyTestMain(m)
}

// core judges callers by the labels of a map.
type core struct {
	keys   *access.Registry
	mu     sync.Mutex
	labels map[devices.ID]map[string]string
	notes  []string
	broken atomic.Bool // it panics when it judges an event
}

func (c *core) Keys() *access.Registry { return c.keys }

func (c *core) Permit(_ context.Context, p access.Principal, scope access.Scope, id devices.ID) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if no := p.Permit(scope, string(id), c.labels[id]); no != nil {
		return devices.Errorf(devices.CodeForbidden, "%s", no.Detail)
	}
	return nil
}

func (c *core) PermitEvent(ctx context.Context, p access.Principal, e *devices.StreamEvent) error {
	if c.broken.Load() {
		panic("a bug")
	}
	if e.Kind.OfJob() && p.Caller.Limited() && e.Owner != p.Key() {
		return devices.Errorf(devices.CodeForbidden, "another key created the job")
	}
	return c.Permit(ctx, p, access.ScopeEvents, e.Device)
}

func (c *core) NoteChange(by access.Principal, action string, _ devices.ID, detail string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notes = append(c.notes, fmt.Sprint(action, " ", detail, " ", err, " through ", by.Caller.Through))
}

// wire is a Store that can be cut off, and that can lose writes of the status.
type wire struct {
	webhooks.Store
	cut, lose atomic.Bool
	read      func() // after the next Get
}

var errCut = fmt.Errorf("%w: cut", devices.ErrDatabase)

func (w *wire) Cut() { w.cut.Store(true) }

func (w *wire) Get(ctx context.Context, id string) (webhooks.Hook, error) {
	h, err := w.Store.Get(ctx, id)
	if read := w.read; read != nil {
		w.read = nil
		read()
	}
	return h, err
}

func (w *wire) List(ctx context.Context) ([]webhooks.Hook, error) {
	if w.cut.Load() {
		return nil, errCut
	}
	return w.Store.List(ctx)
}

func (w *wire) Save(ctx context.Context, instance string, statuses map[string]webhooks.Status) ([]string, error) {
	if w.cut.Load() || w.lose.Load() {
		return nil, errCut
	}
	return w.Store.Save(ctx, instance, statuses)
}

func (w *wire) Release(ctx context.Context, instance string) error {
	if w.cut.Load() {
		return errCut
	}
	return w.Store.Release(ctx, instance)
}

// world is a fleet without nodes: a database, a NATS server, and managers.
type world struct {
	t     *testing.T
	db    storetest.Database
	store *store.Store
	core  *core
	bus   *events.Bus
	nc    *nats.Conn
	mint  *credential.Mint
	seq   int64
}

func newWorld(t *testing.T, db storetest.Database) *world {
	t.Helper()
	w := &world{t: t, db: db, core: &core{keys: access.NewRegistry(), labels: map[devices.ID]map[string]string{}}}
	log := slog.New(slog.DiscardHandler)
	var err error
	if w.store, err = store.Open(t.Context(), db.URL, "", log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.store.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := w.store.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := natstest.Start(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	if w.nc, err = nats.Connect(s.ClientURL()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.nc.Close)
	if w.bus, err = events.New(events.Options{Conn: w.nc, Prefix: "test.v1", Node: "n1", Retention: time.Hour, Limit: 10 << 20, NotificationLimit: 10 << 20, Log: log}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.bus.Close)
	w.bus.Open(devices.Alone)
	devicetest.Eventually(t, "the streams exist", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		return errors.Is(w.bus.Follow(ctx, devices.EventQuery{}, nil), context.DeadlineExceeded)
	})
	if w.mint, err = credential.New([]byte("a secret for tests only")); err != nil {
		t.Fatal(err)
	}
	return w
}

// manager starts one more process.
func (w *world) manager(allow ...string) (*webhooks.Manager, *wire) {
	w.t.Helper()
	if allow == nil {
		allow = []string{"127.0.0.0/8"}
	}
	allowed, err := egress.Parse("--webhook-allow", allow)
	if err != nil {
		w.t.Fatal(err)
	}
	s := &wire{Store: webhookstore.New(w.store)}
	w.seq++
	m := webhooks.New(webhooks.Options{Store: s, Fleet: w.core, Events: w.bus, Mint: w.mint, Allow: allowed, Instance: fmt.Sprint("process ", w.seq), Log: slog.New(slog.NewTextHandler(w.t.Output(), nil))})
	w.t.Cleanup(m.Close)
	return m, s
}

var admin = access.Principal{Caller: access.Admin}

func (w *world) create(m *webhooks.Manager, by access.Principal, n api.NewWebhook) api.CreatedWebhook {
	w.t.Helper()
	h, err := m.Create(w.t.Context(), by, n)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// key makes a key with events:read and webhooks.
func (w *world) key(name, sel string) (access.Principal, access.Key) {
	w.t.Helper()
	scopes, err := access.ParseScopes([]string{"events:read", "webhooks"})
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := selector.Parse(sel)
	if err != nil {
		w.t.Fatal(err)
	}
	k, _, err := access.NewKey(name, scopes, s, nil, time.Now(), time.Time{})
	if err == nil {
		_, err = w.core.keys.Put(k, time.Now())
	}
	if err != nil {
		w.t.Fatal(err)
	}
	who, _ := w.core.keys.Caller(k.ID)
	return access.Principal{Caller: who}, k
}

// happen publishes events of a kind with numbers.
func (w *world) happen(kind devices.EventKind, id devices.ID, numbers ...int) {
	for _, n := range numbers {
		w.bus.Publish(devices.Event{Kind: kind, Device: id, Epoch: 7, Seq: int64(n), Time: time.Now(), MsgID: fmt.Sprintf("%s-%s-%d", id, kind, n), Fields: json.RawMessage(fmt.Sprintf(`"n":%d`, n))})
	}
}

// retry waits until the only webhook of a manager has begun an attempt, and ended it without success.
func (w *world) retry(m *webhooks.Manager) {
	w.t.Helper()
	failed := m.Deliveries.Get("failed")
	devicetest.Eventually(w.t, "it is tried again", func() bool { return m.Deliveries.Get("failed") > failed+1 }) // the first had begun
}

// stream is the stream of events.
func (w *world) stream() jetstream.Stream {
	w.t.Helper()
	js, err := jetstream.New(w.nc)
	if err != nil {
		w.t.Fatal(err)
	}
	stream, err := js.Stream(w.t.Context(), "TEST_V1_EVENTS")
	if err != nil {
		w.t.Fatal(err)
	}
	return stream
}

// event returns the last stored event of a kind.
func (w *world) event(kind devices.EventKind) (e struct {
	Webhook, Owner string
	LastError      string `json:"last_error"`
}) {
	w.t.Helper()
	found, err := w.bus.Recent(w.t.Context(), devices.EventQuery{Kind: kind}, 1, func(*devices.StreamEvent) bool { return true })
	if err == nil && len(found) == 1 {
		err = json.Unmarshal(found[0].Data, &e)
	}
	if err != nil || len(found) != 1 || found[0].Owner != e.Owner {
		w.t.Errorf("%+v, %v", found, err)
	}
	return e
}

// delivery is what a receiver gets.
type delivery struct {
	ID   string
	Type string
	Gap  []struct {
		Stream   string
		From, To uint64
	}
	Data struct {
		Device string
		N      int
		Reason string
		Since  time.Time `json:"offline_since"`
	}
	Webhook string
}

// receiver is somebody's server.
type receiver struct {
	*httptest.Server
	t      *testing.T
	secret atomic.Pointer[string]
	answer atomic.Pointer[http.HandlerFunc]

	mu       sync.Mutex
	accepted []delivery
	attempts int
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{t: t}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) respond(f http.HandlerFunc) { r.answer.Store(&f) }

func (r *receiver) fail(status int) {
	r.respond(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	d := delivery{ID: req.Header.Get("webhook-id")}
	if err != nil || json.Unmarshal(body, &d) != nil || req.Method != "POST" {
		r.t.Errorf("%s %q: %v", req.Method, body, err)
	}
	if secret := r.secret.Load(); secret != nil {
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(*secret, "whsec_"))
		if want := webhooks.SignatureOf(key, d.ID, req.Header.Get("webhook-timestamp"), body); err != nil || req.Header.Get("webhook-signature") != want {
			r.t.Errorf("signature %q, want %q", req.Header.Get("webhook-signature"), want)
		}
	}
	r.mu.Lock()
	r.attempts++
	r.mu.Unlock()
	if answer := r.answer.Load(); answer != nil && *answer != nil {
		(*answer)(w, req)
		return
	}
	r.mu.Lock()
	r.accepted = append(r.accepted, d)
	r.mu.Unlock()
}

func (r *receiver) got() ([]delivery, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.accepted), r.attempts
}

func (r *receiver) numbers() (out []int) {
	all, _ := r.got()
	for _, d := range all {
		out = append(out, d.Data.N)
	}
	return out
}

func (r *receiver) await(numbers ...int) {
	r.t.Helper()
	defer func() {
		if r.t.Failed() {
			r.t.Logf("delivered are %v", r.numbers())
		}
	}()
	devicetest.Eventually(r.t, fmt.Sprintf("%v are delivered", numbers), func() bool { return slices.Equal(r.numbers(), numbers) })
}

// awaitSorted is await for events of several devices, which have no order among each other.
func (r *receiver) awaitSorted(numbers ...int) {
	r.t.Helper()
	devicetest.Eventually(r.t, fmt.Sprintf("%v are delivered", numbers), func() bool { return slices.Equal(slices.Sorted(slices.Values(r.numbers())), numbers) })
}

func numbersTo(n int) (out []int) {
	for i := range n {
		out = append(out, i+1)
	}
	return out
}

// A webhook gets the types and devices that it names, signed.
func TestDelivers(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	w.core.labels["a"] = map[string]string{"room": "lab"}
	m, _ := w.manager()
	all, lab := newReceiver(t), newReceiver(t)
	first := w.create(m, admin, api.NewWebhook{URL: all.URL, Types: []string{"online", "offline"}})
	all.secret.Store(&first.Secret)
	given := "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 24))
	second := w.create(m, admin, api.NewWebhook{URL: lab.URL, Types: []string{"online"}, Select: "room=lab", Secret: given})
	lab.secret.Store(&given)
	if second.Secret != "" || !strings.HasPrefix(first.Secret, "whsec_") {
		t.Errorf("secrets %q, %q", first.Secret, second.Secret)
	}
	w.happen(devices.EventOnline, "a", 1)
	w.happen(devices.EventPending, "a", 2)
	w.happen(devices.EventOnline, "b", 3)
	w.happen(devices.EventOffline, "a", 4)
	all.awaitSorted(1, 3, 4)
	lab.await(1)
	got, _ := all.got()
	slices.SortFunc(got, func(a, b delivery) int { return a.Data.N - b.Data.N })
	if got[0].Type != "online" || got[2].Type != "offline" || got[0].Webhook != first.ID || got[0].Data.Device != "a" || got[0].ID == got[1].ID {
		t.Errorf("%+v", got)
	}
	list, err := m.List(t.Context(), admin)
	if err != nil || len(list) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	devicetest.Eventually(t, "deliveries are counted", func() bool {
		list, err = m.List(t.Context(), admin)
		return err == nil && list[0].Delivered+list[1].Delivered == 4
	})
	text, _ := json.Marshal(list)
	key, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(first.Secret, "whsec_"))
	var sealed string
	if err := w.db.Raw.QueryRow(`SELECT sealed FROM webhooks WHERE id = $1`, first.ID).Scan(&sealed); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), first.Secret) || strings.Contains(sealed, first.Secret[6:20]) || strings.Contains(sealed, string(key)) {
		t.Errorf("the secret is shown: %s", text)
	}
	// A change continues after the last event, with a new secret.
	empty, types := "", []string{"pending"}
	if _, err := m.Edit(t.Context(), admin, first.ID, api.WebhookEdit{Types: &types, IfMatch: "99"}); devices.AsError(err).Code != devices.CodeStale {
		t.Errorf("an edit of another revision: %v", err)
	}
	read, err := m.Get(t.Context(), admin, first.ID)
	if err != nil {
		t.Fatal(err)
	}
	edited, err := m.Edit(t.Context(), admin, first.ID, api.WebhookEdit{Types: &types, Secret: &empty, IfMatch: read.Revision()})
	if err != nil || edited.Secret == "" || edited.Secret == first.Secret {
		t.Fatalf("%+v, %v", edited, err)
	}
	all.secret.Store(&edited.Secret)
	number := 4
	devicetest.Eventually(t, "the change is in force", func() bool {
		number++
		w.happen(devices.EventPending, "a", number)
		return len(all.numbers()) > 3
	})
	if err := m.Delete(t.Context(), admin, first.ID, read.Revision()); devices.AsError(err).Code != devices.CodeStale {
		t.Errorf("a webhook that was edited is deleted as it was before: %v", err)
	}
	if err := m.Delete(t.Context(), admin, first.ID, ""); err != nil {
		t.Fatal(err)
	}
	if err := m.Delete(t.Context(), admin, first.ID, ""); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("deleted twice: %v", err)
	}
}

// A deletion of a revision does not delete what an edit made of the webhook meanwhile.
func TestDeleteBesideAnEdit(t *testing.T) {
	for name, db := range map[string]storetest.Database{"SQLite": storetest.SQLite(t), "Postgres": storetest.Postgres(t)} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, db)
			m, store := w.manager()
			h := w.create(m, admin, api.NewWebhook{URL: newReceiver(t).URL, Types: []string{"online"}})
			edit := func() {
				if _, err := m.Edit(t.Context(), admin, h.ID, api.WebhookEdit{Types: &[]string{"offline"}}); err != nil {
					t.Error(err)
				}
			}
			store.read = edit
			if err := m.Delete(t.Context(), admin, h.ID, h.Revision()); devices.AsError(err).Code != devices.CodeStale {
				t.Errorf("it is deleted: %v", err)
			}
			store.read = edit
			if err := m.Delete(t.Context(), admin, h.ID, ""); err != nil {
				t.Errorf("any revision: %v", err)
			}
		})
	}
}

// A receiver that fails for long gets everything afterwards, once each by id and in order; one that never answers costs
// nobody else.
func TestReceiverThatFails(t *testing.T) {
	for name, db := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, db(t))
			m, _ := w.manager()
			failing, healthy, silent := newReceiver(t), newReceiver(t), newReceiver(t)
			held := make(chan struct{})
			silent.respond(func(http.ResponseWriter, *http.Request) { <-held })
			defer close(held)
			failing.fail(503)
			for _, r := range []*receiver{silent, failing, healthy} {
				h := w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
				r.secret.Store(&h.Secret)
			}
			const count = 50
			for n := range count {
				w.happen(devices.EventOnline, "a", n+1)
			}
			healthy.await(numbersTo(count)...)
			devicetest.Eventually(t, "many attempts failed, and were counted", func() bool { return m.Deliveries.Get("failed") >= 60 })
			list, err := m.List(t.Context(), admin)
			i := slices.IndexFunc(list, func(h api.Webhook) bool { return h.URL == failing.URL })
			if err != nil || list[i].State != "failing" || list[i].LastError != "the receiver answered 503" || list[i].FailingSince.IsZero() {
				t.Errorf("%+v, %v", list[i], err)
			}
			failing.respond(nil)
			failing.await(numbersTo(count)...)
			ids := map[string]bool{}
			got, _ := failing.got()
			for _, d := range got {
				ids[d.ID] = true
			}
			if len(ids) != count {
				t.Errorf("%d ids of %d deliveries", len(ids), count)
			}
			devicetest.Eventually(t, "it is active again", func() bool {
				list, err := m.List(t.Context(), admin)
				return err == nil && list[i].State == "active" && list[i].FailingSince.IsZero()
			})
			devicetest.Eventually(t, "an attempt at the one that does not answer", func() bool { _, n := silent.got(); return n > 0 })
			if _, n := silent.got(); n != 1 {
				t.Errorf("%d attempts at the one that does not answer, while the first waits for its answer", n)
			}
		})
	}
}

// On SQLite a webhook for which nothing happens writes nothing, and there are no leases.
func TestIdleWritesNothing(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online", "offline"}, OfflineFor: "10m"})
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	w.happen(devices.EventOnline, "a", 1)
	devicetest.Eventually(t, "the event is recorded", func() bool { return w.db.Count(t, `SELECT count(*) FROM webhooks WHERE position <> ''`) == 2 })
	conn, err := w.db.Raw.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	commits := func() (n int) {
		t.Helper()
		if err := conn.QueryRowContext(t.Context(), `PRAGMA data_version`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := commits()
	time.Sleep(20 * webhooks.Turn())
	if after := commits(); after != before {
		t.Errorf("%d commits while nothing happened", after-before)
	}
	if n := w.db.Count(t, `SELECT count(*) FROM webhooks WHERE instance <> '' OR beat <> 0`); n != 0 {
		t.Errorf("%d leases on SQLite", n)
	}
}

// A bug that stops the work of a webhook is shown as its failure, and the webhook continues when the bug does not occur any more.
func TestPanicIsAFailure(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	w.core.broken.Store(true)
	w.happen(devices.EventOnline, "a", 1)
	devicetest.Eventually(t, "the failure is shown", func() bool {
		list, err := m.List(t.Context(), admin)
		return err == nil && list[0].State == "failing" && strings.Contains(list[0].LastError, "internal error")
	})
	w.core.broken.Store(false)
	r.await(1)
	devicetest.Eventually(t, "it is active again", func() bool {
		list, err := m.List(t.Context(), admin)
		return err == nil && list[0].State == "active"
	})
}

// Deliveries to a receiver that takes its time are made side by side; those of one device stay in order.
func TestSideBySide(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	// The receiver answers none before it has four.
	var arrived atomic.Int32
	four := make(chan struct{})
	r.respond(func(http.ResponseWriter, *http.Request) {
		if arrived.Add(1) == 4 {
			close(four)
			r.respond(nil)
		}
		select {
		case <-four:
		case <-t.Context().Done():
		}
	})
	for n := range 10 {
		for d := range 4 {
			w.happen(devices.EventOnline, devices.ID(fmt.Sprint("d", d)), n+1)
		}
	}
	select {
	case <-four:
	case <-time.After(30 * time.Second):
		t.Fatalf("%d deliveries are on their way at once, and not 4", arrived.Load())
	}
	order := func() map[string][]int {
		out := map[string][]int{}
		all, _ := r.got()
		for _, d := range all {
			out[d.Data.Device] = append(out[d.Data.Device], d.Data.N)
		}
		return out
	}
	devicetest.Eventually(t, "all is delivered", func() bool { return len(r.numbers()) == 36 })
	for id, numbers := range order() {
		if !slices.Equal(numbers, numbersTo(10)[1:]) {
			t.Errorf("%s: %v", id, numbers)
		}
	}
}

// A receiver that answers every second request keeps up with events of one device: the pause after a single failure is short,
// where a second for each would take 100 s.
func TestReceiverThatAnswersHalf(t *testing.T) {
	webhooks.RetryAsEver(t)
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	var n atomic.Int32
	r.respond(func(w http.ResponseWriter, req *http.Request) {
		if n.Add(1)%2 == 0 {
			w.WriteHeader(503)
		} else {
			w.WriteHeader(200)
		}
	})
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	begun := time.Now()
	const count = 100
	w.happen(devices.EventOnline, "a", numbersTo(count)...)
	devicetest.Eventually(t, "all are delivered", func() bool { return m.Deliveries.Get("delivered") == count })
	if took := time.Since(begun); took > count*time.Second/4 {
		t.Errorf("%d events took %v", count, took)
	}
}

// The streams are read once, however many webhooks there are, and one whose receiver fails does not keep the others from it.
func TestOneReader(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r, failing := newReceiver(t), newReceiver(t)
	failing.fail(500)
	const count = 20
	for range count - 1 {
		w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"offline"}})
	}
	w.create(m, admin, api.NewWebhook{URL: failing.URL, Types: []string{"online"}})
	number := 0
	readers := func() int {
		number++
		w.happen(devices.EventOnline, "a", number)
		info, err := w.stream().Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return info.State.Consumers
	}
	devicetest.Eventually(t, "all have their position", func() bool {
		return readers() >= 1 && w.db.Count(t, `SELECT count(*) FROM webhooks WHERE position <> ''`) >= count-1
	})
	devicetest.Eventually(t, "there is one reader", func() bool { return readers() == 1 })
	// The window of the one that fails is full.
	more := racetest.Size(2000, 1000) // more than a window has
	for n := range more {
		w.happen(devices.EventOnline, "b", n)
	}
	w.happen(devices.EventOffline, "a", 1)
	devicetest.Eventually(t, "the others go on", func() bool { return len(r.numbers()) == count-1 })
	failing.respond(nil)
	devicetest.Eventually(t, "it has all", func() bool { return len(failing.numbers()) == number+more })
	devicetest.Eventually(t, "there is one reader again", func() bool { return readers() == 1 })
}

// A webhook that fails for days is disabled, with an event, and is delivered again when somebody enables it.
func TestFailsForDays(t *testing.T) {
	for name, db := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, db(t))
			m, _ := w.manager()
			failing, other := newReceiver(t), newReceiver(t)
			failing.fail(500)
			lab, _ := w.key("lab", "")
			h := w.create(m, lab, api.NewWebhook{URL: failing.URL, Types: []string{"online"}})
			told := w.create(m, admin, api.NewWebhook{URL: other.URL, Types: []string{"webhook.disabled"}})
			w.happen(devices.EventOnline, "a", 1)
			w.retry(m)
			m.Close()
			w.db.Exec(t, `UPDATE webhooks SET failing_since = failing_since - $1 WHERE id = $2`, (73 * time.Hour).Microseconds(), h.ID)
			m, _ = w.manager()
			get := func() api.Webhook {
				t.Helper()
				got, err := m.Get(t.Context(), lab, h.ID)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			devicetest.Eventually(t, "it is disabled", func() bool { return get().State == "disabled" })
			if got := get(); got.Reason == "" || got.LastError != "the receiver answered 500" {
				t.Errorf("%+v", got)
			}
			devicetest.Eventually(t, "the event is delivered", func() bool {
				all, _ := other.got()
				return len(all) == 1 && all[0].Type == "webhook.disabled" && all[0].Webhook == told.ID
			})
			if e := w.event(devices.EventWebhookDisabled); e.Webhook != h.ID || e.Owner != lab.Key() || e.LastError != "the receiver answered 500" {
				t.Errorf("%+v", e)
			}
			_, attempts := failing.got()
			time.Sleep(10 * webhooks.Turn())
			if _, n := failing.got(); n != attempts {
				t.Errorf("%d attempts after it was disabled", n-attempts)
			}
			failing.respond(nil)
			state := "active"
			if _, err := m.Edit(t.Context(), lab, h.ID, api.WebhookEdit{State: &state}); err != nil {
				t.Fatal(err)
			}
			failing.await(1)
			devicetest.Eventually(t, "it is active", func() bool { got := get(); return got.State == "active" && got.FailingSince.IsZero() })
		})
	}
}

// While deliveries cannot be recorded nothing is delivered, and what waits follows when they can.
func TestNothingIsRecorded(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, wire := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	w.happen(devices.EventOnline, "a", 1)
	r.await(1)
	devicetest.Eventually(t, "it is recorded", func() bool {
		list, err := m.List(t.Context(), admin)
		return err == nil && list[0].Delivered == 1
	})
	wire.lose.Store(true)
	w.happen(devices.EventOnline, "a", 2)
	r.await(1, 2)
	time.Sleep(10 * webhooks.Turn()) // the record of the second one fails
	w.happen(devices.EventOnline, "b", 3)
	time.Sleep(10 * webhooks.Turn())
	if n := r.numbers(); len(n) != 2 {
		t.Errorf("delivered are %v", n)
	}
	wire.lose.Store(false)
	r.await(1, 2, 3)
}

// Of two processes one delivers. If it is killed after the receiver has accepted and before that is written, the other
// delivers again, with the same id, and goes on.
func TestKilledBetweenDeliveryAndRecord(t *testing.T) {
	for name, db := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, db(t))
			one, wireOne := w.manager()
			r := newReceiver(t)
			w.create(one, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
			w.happen(devices.EventOnline, "a", 1, 2)
			r.await(1, 2)
			devicetest.Eventually(t, "both are recorded", func() bool {
				list, err := one.List(t.Context(), admin)
				return err == nil && list[0].Delivered == 2
			})
			var two *webhooks.Manager
			if name == "Postgres" { // on SQLite there is one process
				two, _ = w.manager()
			}
			w.happen(devices.EventOnline, "a", 3, 4)
			r.await(1, 2, 3, 4)
			devicetest.Eventually(t, "the first process has recorded all", func() bool {
				list, err := one.List(t.Context(), admin)
				return err == nil && list[0].Delivered == 4
			})
			if two != nil && two.Deliveries.Get("delivered") != 0 {
				t.Error("the second process has delivered")
			}
			wireOne.lose.Store(true)
			w.happen(devices.EventOnline, "a", 5)
			r.await(1, 2, 3, 4, 5)
			one.Kill(wireOne)
			if two == nil {
				two, _ = w.manager()
			}
			w.db.Exec(t, `UPDATE webhooks SET instance = ''`) // its lease is over; when that is, TestLease says
			w.happen(devices.EventOnline, "a", 6)
			r.await(1, 2, 3, 4, 5, 5, 6)
			if got, _ := r.got(); got[4].ID != got[5].ID || got[5].ID == got[6].ID {
				t.Errorf("ids %+v", got[4:])
			}
			devicetest.Eventually(t, "the second process has counted both", func() bool { return two.Deliveries.Get("delivered") == 2 })
			// One that stops ends its lease at once.
			two.Close()
			three, _ := w.manager()
			w.happen(devices.EventOnline, "a", 7)
			r.await(1, 2, 3, 4, 5, 5, 6, 7)
			devicetest.Eventually(t, "the third process has delivered", func() bool { return three.Deliveries.Get("delivered") == 1 })
		})
	}
}

// A process has the lease of a webhook until it does not renew it for as long as it lasts, by the clock of the others: what the
// clocks of the database and of the nodes do does not matter.
func TestLease(t *testing.T) {
	const lasts = 300 * time.Millisecond
	w := newWorld(t, storetest.Postgres(t))
	m, _ := w.manager()
	h := w.create(m, admin, api.NewWebhook{URL: newReceiver(t).URL, Types: []string{"online"}})
	m.Close()
	stores := map[string]*webhookstore.Store{"a": webhookstore.New(w.store), "b": webhookstore.New(w.store)}
	lease := func(instance string) bool {
		t.Helper()
		mine, err := stores[instance].Lease(t.Context(), h.ID, instance, 1, lasts)
		if err != nil {
			t.Fatal(err)
		}
		return mine
	}
	for until := time.Now().Add(2 * lasts); time.Now().Before(until); time.Sleep(lasts / 10) {
		if !lease("a") || lease("b") {
			t.Fatal("the lease is not that of who renews it")
		}
	}
	devicetest.Eventually(t, "the other process takes the lease", func() bool { return lease("b") })
	if lease("a") {
		t.Error("two have the lease")
	}
}

// A webhook acts as the key that made it: it gets what that key may see, others do not see it, and it stops with it.
func TestActsAsItsCreator(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	w.core.labels["a"], w.core.labels["b"] = map[string]string{"room": "lab"}, map[string]string{"room": "hall"}
	m, _ := w.manager()
	lab, k := w.key("lab", "room=lab")
	other, _ := w.key("other key", "")
	mine, all := newReceiver(t), newReceiver(t)
	h := w.create(m, lab, api.NewWebhook{URL: mine.URL, Types: []string{"online"}, Select: "room in (lab,hall)"})
	w.create(m, other, api.NewWebhook{URL: all.URL, Types: []string{"online"}})
	w.happen(devices.EventOnline, "a", 1)
	w.happen(devices.EventOnline, "b", 2)
	w.happen(devices.EventOnline, "a", 3)
	all.awaitSorted(1, 2, 3)
	mine.await(1, 3)

	for by, want := range map[*access.Principal]int{&lab: 1, &other: 1, &admin: 2} {
		if list, err := m.List(t.Context(), *by); err != nil || len(list) != want {
			t.Errorf("%s sees %d webhooks, %v", by.Name(), len(list), err)
		}
	}
	url := all.URL
	if _, err := m.Edit(t.Context(), other, h.ID, api.WebhookEdit{URL: &url}); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("another key changes it: %v", err)
	}
	if err := m.Delete(t.Context(), other, h.ID, ""); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("another key deletes it: %v", err)
	}
	if _, err := m.Test(t.Context(), other, h.ID); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("another key tries it: %v", err)
	}
	scopes, _ := access.ParseScopes([]string{"webhooks"})
	if _, err := m.Create(t.Context(), access.Principal{Caller: access.NewCaller("k", "k", scopes, selector.Selector{}, nil)}, api.NewWebhook{URL: url, Types: []string{"online"}}); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("a key without events:read: %v", err)
	}

	k.Revoked = time.Now()
	if _, err := w.core.keys.Put(k, time.Now()); err != nil {
		t.Fatal(err)
	}
	w.happen(devices.EventOnline, "a", 4)
	all.awaitSorted(1, 2, 3, 4)
	list, err := m.List(t.Context(), admin)
	i := slices.IndexFunc(list, func(x api.Webhook) bool { return x.ID == h.ID })
	if err != nil || list[i].State != "stopped" || list[i].Reason != "the key lab that created it was revoked" {
		t.Errorf("%+v, %v", list[i], err)
	}
	w.happen(devices.EventOnline, "a", 5)
	all.awaitSorted(1, 2, 3, 4, 5)
	mine.await(1, 3)
	if _, err := m.Test(t.Context(), admin, h.ID); devices.AsError(err).Code != devices.CodeConflict {
		t.Errorf("a stopped one is tried: %v", err)
	}
}

// A name that resolves to an address that is not public is refused when it is dialled, whatever it was before.
func TestAddressIsJudgedWhenDialled(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	r := newReceiver(t)
	named := strings.Replace(r.URL, "127.0.0.1", "localhost", 1)
	strict, _ := w.manager("192.0.2.0/24")
	if _, err := strict.Create(t.Context(), admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}}); err == nil || !strings.Contains(err.Error(), "--webhook-allow") {
		t.Errorf("an address: %v", err)
	}
	h := w.create(strict, admin, api.NewWebhook{URL: named, Types: []string{"online"}})
	outcome, err := strict.Test(t.Context(), admin, h.ID)
	// security: N50
	if err != nil || outcome.Delivered || !strings.Contains(outcome.Error, "not a public address") || !strings.Contains(outcome.Error, "--webhook-allow") {
		t.Errorf("a name: %+v, %v", outcome, err)
	}
	w.happen(devices.EventOnline, "a", 1)
	devicetest.Eventually(t, "the refusal is shown", func() bool {
		list, err := strict.List(t.Context(), admin)
		return err == nil && strings.Contains(list[0].LastError, "--webhook-allow")
	})
	// security: N50
	if _, n := r.got(); n != 0 {
		t.Errorf("%d requests reached a private address", n)
	}
	strict.Close()
	w.manager("localhost")
	r.await(1)
}

// Redirects are not followed, and an answer without end costs 64 KiB.
func TestHostileReceivers(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r, target := newReceiver(t), newReceiver(t)
	h := w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"photo"}})
	test := func() api.WebhookTest {
		t.Helper()
		outcome, err := m.Test(t.Context(), admin, h.ID)
		if err != nil {
			t.Fatal(err)
		}
		return outcome
	}
	r.respond(func(w http.ResponseWriter, req *http.Request) {
		http.Redirect(w, req, target.URL, http.StatusTemporaryRedirect)
	})
	if got := test(); got.Delivered || got.Status != 307 || !strings.Contains(got.Error, "redirects are not followed") {
		t.Errorf("%+v", got)
	}
	// security: N50
	if _, n := target.got(); n != 0 {
		t.Error("the redirect was followed")
	}
	var closed atomic.Bool
	r.respond(func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 32<<10)); err != nil {
				closed.Store(true)
				return
			}
		}
	})
	if got := test(); !got.Delivered {
		t.Errorf("%+v", got)
	}
	devicetest.Eventually(t, "the connection is closed", closed.Load)
	r.respond(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Text", strings.Repeat("x", 100<<10))
		w.WriteHeader(200)
	})
	if got := test(); got.Delivered || len(got.Error) > 300 {
		t.Errorf("%+v", got)
	}
	r.Close()
	if got := test(); got.Delivered || got.Status != 0 || got.Error != "connection refused: nothing listens on the port of the URL" {
		t.Errorf("%+v", got)
	}
}

// Events that the stream does not have any more are a gap in the next delivery.
func TestGap(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	w.happen(devices.EventOnline, "a", 1)
	r.await(1)
	r.fail(500)
	w.happen(devices.EventOnline, "a", 2, 3, 4)
	devicetest.Eventually(t, "an attempt failed", func() bool { return m.Deliveries.Get("failed") > 2 })
	m.Close() // what a process has read is delivered also if the stream has it no more
	if err := w.stream().Purge(t.Context(), jetstream.WithPurgeKeep(1)); err != nil {
		t.Fatal(err)
	}
	m, _ = w.manager()
	w.retry(m)
	r.respond(nil)
	devicetest.Eventually(t, "the rest is delivered", func() bool { n := r.numbers(); return len(n) > 1 && n[len(n)-1] == 4 })
	w.happen(devices.EventOnline, "a", 5)
	devicetest.Eventually(t, "and what follows", func() bool { n := r.numbers(); return n[len(n)-1] == 5 })
	got, _ := r.got()
	if len(got) != 3 || len(got[1].Gap) != 1 || got[1].Gap[0].Stream != "events" || len(got[0].Gap)+len(got[2].Gap) != 0 {
		t.Errorf("%+v", got)
	}
}

// Events of other types that are deleted are not missing, and what is missing is one range, however often it grew.
func TestGapsAreOfWhatIsMissing(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	w.happen(devices.EventOnline, "a", 1)
	r.await(1)
	stream := w.stream()
	purge := func() { // all but the newest event
		t.Helper()
		if err := stream.Purge(t.Context(), jetstream.WithPurgeKeep(1)); err != nil {
			t.Fatal(err)
		}
	}
	w.happen(devices.EventPhoto, "a", 2, 3, 4)
	devicetest.Eventually(t, "the photos are left out", func() bool { return w.db.Count(t, `SELECT count(*) FROM webhooks WHERE position = '4'`) == 1 })
	purge()
	m.Close()
	m, _ = w.manager()
	w.happen(devices.EventOnline, "a", 5)
	r.await(1, 5)
	if got, _ := r.got(); len(got[1].Gap) != 0 {
		t.Errorf("photos are missing: %+v", got[1])
	}
	r.fail(500)
	for last := uint64(7); last <= 11; last += 2 {
		w.happen(devices.EventOnline, "a", int(last)-1, int(last))
		devicetest.Eventually(t, "they are stored", func() bool { info, err := stream.Info(t.Context()); return err == nil && info.State.LastSeq == last })
		m.Close()
		purge()
		m, _ = w.manager()
		w.retry(m)
	}
	r.respond(nil)
	r.await(1, 5, 11)
	if got, _ := r.got(); len(got[2].Gap) != 1 || got[2].Data.N != 11 || got[2].Gap[0].From != 6 || got[2].Gap[0].To != 10 {
		t.Errorf("%+v", got[2])
	}
}

// offline_for is computed from what the database has: from a device that was away before the manager started, once for
// each absence, and never for one that came back.
func TestOfflineFor(t *testing.T) {
	for name, maker := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, maker(t))
			m, _ := w.manager()
			r := newReceiver(t)
			w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"offline", "online"}, OfflineFor: "10m", Select: "!spare"})
			w.core.labels["spare"] = map[string]string{"spare": "1"}
			away := func(id string, since time.Duration) {
				w.db.Exec(t, `INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, mcp_state, mcp_error, catalog, catalog_partial, tool_count, offline_since)
 VALUES ($1, 1, 1, FALSE, '', '', '', '', 'dead', 0, 0, 'unknown', '', '', FALSE, 0, $2) ON CONFLICT (device) DO UPDATE SET online = FALSE, offline_since = excluded.offline_since`, id, time.Now().Add(-since).UnixMicro())
			}
			away("long before the webhook", time.Hour)
			away("short", 5*time.Minute)
			away("spare", 10*time.Minute-time.Second)
			away("due", 10*time.Minute-time.Second)
			// It was away for less than ten minutes: neither its absence nor its return is delivered.
			w.happen(devices.EventOffline, "a", 1)
			w.happen(devices.EventOnline, "a", 2)
			delivered := func() (out []string) {
				all, _ := r.got()
				for _, d := range all {
					out = append(out, d.Type+" "+d.Data.Device)
				}
				slices.Sort(out)
				return out
			}
			want := []string{"offline due"}
			devicetest.Eventually(t, "the absence is delivered", func() bool { return slices.Equal(delivered(), want) })
			w.db.Exec(t, `INSERT INTO webhook_offline (webhook, device, since) SELECT id, 'forgotten', $1 FROM webhooks`, time.Now().Add(-72*time.Hour).UnixMicro())
			devicetest.Eventually(t, "the delivery is noted", func() bool {
				return m.Deliveries.Get("delivered") == 1 && w.db.Count(t, `SELECT count(*) FROM webhook_offline WHERE device = 'due'`) == 1
			})
			// After a restart it is not delivered again; another absence is.
			m.Close()
			w.manager()
			w.happen(devices.EventOnline, "a", 3)
			away("late", 10*time.Minute-500*time.Millisecond)
			want = []string{"offline due", "offline late"}
			devicetest.Eventually(t, "another absence", func() bool { return slices.Equal(delivered(), want) })
			// The return of a device whose absence was delivered is, too, once.
			w.db.Exec(t, `UPDATE presence SET online = TRUE, offline_since = 0 WHERE device = 'due'`)
			w.happen(devices.EventOnline, "due", 4)
			want = []string{"offline due", "offline late", "online due"}
			devicetest.Eventually(t, "the return", func() bool { return slices.Equal(delivered(), want) })
			devicetest.Eventually(t, "the return is noted", func() bool {
				return w.db.Count(t, `SELECT count(*) FROM webhook_offline WHERE device = 'due' AND ended`) == 1
			})
			w.happen(devices.EventOnline, "due", 5)
			w.happen(devices.EventOnline, "a", 6)
			devicetest.Eventually(t, "what follows is left out", func() bool { return w.db.Count(t, `SELECT count(*) FROM webhooks WHERE position = '6'`) == 1 })
			if got := delivered(); !slices.Equal(got, want) {
				t.Errorf("%v", got)
			}
			got, _ := r.got()
			i := slices.IndexFunc(got, func(d delivery) bool { return d.Data.Device == "due" })
			if got[i].Data.Reason != "dead" || time.Since(got[i].Data.Since) < 10*time.Minute {
				t.Errorf("%+v", got[i])
			}
			devicetest.Eventually(t, "the two that were delivered and the one that was left out are noted", func() bool { return w.db.Count(t, `SELECT count(*) FROM webhook_offline`) == 3 })
		})
	}
}

// Absences are read page by page, also past those that were reported.
func TestManyAbsences(t *testing.T) {
	for name, maker := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, maker(t))
			m, wire := w.manager()
			r := newReceiver(t)
			w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"offline"}, OfflineFor: "10m"})
			const count = 250
			for n := range count {
				w.db.Exec(t, `INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, mcp_state, mcp_error, catalog, catalog_partial, tool_count, offline_since)
 VALUES ($1, 1, 1, FALSE, '', '', '', '', 'dead', 0, 0, 'unknown', '', '', FALSE, 0, $2)`, fmt.Sprintf("d%03d", n), time.Now().Add(time.Second-10*time.Minute).UnixMicro())
			}
			devicetest.Eventually(t, "all are delivered", func() bool {
				return len(r.numbers()) == count && w.db.Count(t, `SELECT count(*) FROM webhook_offline`) == count
			})
			var after webhooks.OfflineDevice
			list, err := m.List(t.Context(), admin)
			if err != nil {
				t.Fatal(err)
			}
			read := 0
			for {
				page, err := wire.Absent(t.Context(), list[0].ID, after, time.Now(), 100)
				if err != nil {
					t.Fatal(err)
				}
				for _, d := range page {
					if !d.Reported {
						t.Errorf("%s is not reported", d.Device)
					}
				}
				if read += len(page); len(page) < 100 {
					break
				}
				after = page[99]
			}
			if got := len(r.numbers()); read != count || got != count {
				t.Errorf("%d absences of %d, %d deliveries", read, count, got)
			}
		})
	}
}

// What is wrong in a request is named.
func TestRequests(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	const url = "https://example.com/hook?token=geheim"
	for _, tc := range []struct {
		n    api.NewWebhook
		want string
	}{
		{api.NewWebhook{URL: "ftp://example.com", Types: []string{"online"}}, "http or https"},
		{api.NewWebhook{URL: "https://", Types: []string{"online"}}, "http or https"},
		{api.NewWebhook{URL: "https://example.com:99999/", Types: []string{"online"}}, "http or https"},
		{api.NewWebhook{URL: "https://a:b@example.com", Types: []string{"online"}}, "neither user"},
		{api.NewWebhook{URL: url}, "types is missing"},
		{api.NewWebhook{URL: url, Types: []string{"onlin"}}, `not "onlin"`},
		{api.NewWebhook{URL: url, Types: []string{"messages"}}, `not "messages"`},
		{api.NewWebhook{URL: url, Types: []string{"online", "online"}}, "twice"},
		{api.NewWebhook{URL: url, Types: []string{"online"}, OfflineFor: "10m"}, "needs the type offline"},
		{api.NewWebhook{URL: url, Types: []string{"offline"}, OfflineFor: "1s"}, "from 10s to 30d"},
		{api.NewWebhook{URL: url, Types: []string{"offline"}, OfflineFor: "soon"}, "a duration such as 10m"},
		{api.NewWebhook{URL: url, Types: []string{"offline"}, Select: "state=online"}, "select"},
		{api.NewWebhook{URL: url, Types: []string{"offline"}, Select: "room="}, "select"},
		{api.NewWebhook{URL: url, Types: []string{"offline"}, Secret: "whsec_c2hvcnQ="}, "24 to 64 bytes"},
		{api.NewWebhook{URL: "http://[::1]:80/", Types: []string{"offline"}}, "--webhook-allow"},
		{api.NewWebhook{URL: "http://[::ffff:10.0.0.1]/", Types: []string{"offline"}}, "--webhook-allow"},
	} {
		if _, err := m.Create(t.Context(), admin, tc.n); err == nil || devices.AsError(err).Code != devices.CodeBadRequest || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.n, err, tc.want)
		}
	}
	for range webhooks.MaxHooks {
		w.create(m, admin, api.NewWebhook{URL: url, Types: []string{"photo"}})
	}
	if _, err := m.Create(t.Context(), admin, api.NewWebhook{URL: url, Types: []string{"photo"}}); devices.AsError(err).Code != devices.CodeLimitReached {
		t.Errorf("number 101: %v", err)
	}
	if i := slices.IndexFunc(w.core.notes, func(n string) bool { return strings.Contains(n, "geheim") }); i >= 0 {
		t.Errorf("the audit has the URL's token: %s", w.core.notes[i])
	}
	if _, err := m.Edit(t.Context(), admin, "wh_none", api.WebhookEdit{}); !errors.As(err, new(*devices.Error)) || devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("%v", err)
	}
}

// child makes a console key of a key.
func (w *world) child(parent access.Principal, names ...string) (access.Principal, access.Key) {
	w.t.Helper()
	scopes, err := access.ParseScopes(names)
	if err != nil {
		w.t.Fatal(err)
	}
	k, err := w.core.keys.ConsoleKey(parent.Caller, scopes, time.Now())
	if err == nil {
		k, _, err = w.core.keys.Issue(k, time.Now())
	}
	if err == nil {
		_, err = w.core.keys.Put(k, time.Now())
	}
	if err != nil {
		w.t.Fatal(err)
	}
	who, _ := w.core.keys.Caller(k.ID)
	return access.Principal{Caller: who}, k
}

// Of 100 webhooks a key has 37, with those of its console keys, and a second one 19; a quarter is for administrators, and those of
// keys that ended do not count.
func TestShares(t *testing.T) {
	for name, db := range map[string]storetest.Maker{"SQLite": storetest.SQLite, "Postgres": storetest.Postgres} {
		w := newWorld(t, db(t))
		m, _ := w.manager()
		r := newReceiver(t)
		first, k := w.key("first", "")
		second, _ := w.key("second", "")
		var children []access.Principal
		for range 5 {
			child, _ := w.child(first, "webhooks", "events:read")
			children = append(children, child)
		}
		fill := func(all ...access.Principal) (n int) {
			t.Helper()
			for {
				_, err := m.Create(t.Context(), all[n%len(all)], api.NewWebhook{URL: r.URL, Types: []string{"online"}})
				if devices.AsError(errOr(err)).Code == devices.CodeLimitReached {
					return n
				}
				if err != nil {
					t.Fatal(err)
				}
				n++
			}
		}
		// security: K40
		if a, b, c := fill(children...), fill(second), fill(admin); a != 37 || b != 19 || c != 44 || fill(first) != 0 {
			t.Errorf("%s: the first key has %d, the second %d, the administrator %d", name, a, b, c)
		}
		k.Revoked = time.Now()
		if _, err := w.core.keys.Put(k, time.Now()); err != nil {
			t.Fatal(err)
		}
		// security: K40
		if n := fill(admin); n != 37 {
			t.Errorf("%s: %d places are free when the key has ended", name, n)
		}
	}
}

func errOr(err error) error {
	if err == nil {
		return errors.New("none")
	}
	return err
}

// The audit has the host of a webhook's address, without the rest, which members a change sets, and the console key by which it
// was made.
func TestChangesInTheAudit(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	parent, _ := w.key("parent", "")
	child, k := w.child(parent, "webhooks")
	h := w.create(m, parent, api.NewWebhook{URL: r.URL + "/geheim", Types: []string{"online"}})
	elsewhere, types := strings.Replace(r.URL, "127.0.0.1", "127.0.0.2", 1)+"/geheim", []string{"photo"}
	if _, err := m.Edit(t.Context(), child, h.ID, api.WebhookEdit{URL: &elsewhere, Types: &types}); err != nil {
		t.Fatal(err)
	}
	note := w.core.notes[len(w.core.notes)-1]
	host := strings.TrimPrefix(strings.TrimSuffix(elsewhere, "/geheim"), "http://")
	// security: K42
	if !strings.HasPrefix(note, "edit_webhook "+h.ID+" "+host+" photo, set: types, url") || !strings.HasSuffix(note, "through "+k.ID) || strings.Contains(note, "geheim") {
		t.Errorf("in the audit: %s", note)
	}
}

// After a rotation of the fleet's secret the secrets of webhooks are sealed with the new one.
func TestReseal(t *testing.T) {
	w := newWorld(t, storetest.SQLite(t))
	m, _ := w.manager()
	r := newReceiver(t)
	h := w.create(m, admin, api.NewWebhook{URL: r.URL, Types: []string{"online"}})
	r.secret.Store(&h.Secret)
	if err := w.mint.Adopt(credential.Rotation{Secrets: []credential.SealedSecret{{Number: 1, Sealed: w.mint.NewSecret(1)}}}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n, err := m.Reseal(t.Context()); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := m.Reseal(t.Context()); n != 0 || err != nil {
		t.Errorf("again: %d, %v", n, err)
	}
	w.happen(devices.EventOnline, "a", 1)
	r.await(1)
	if outcome, err := m.Test(t.Context(), admin, h.ID); err != nil || !outcome.Delivered {
		t.Errorf("%+v, %v", outcome, err)
	}
}
