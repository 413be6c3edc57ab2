package fleettest

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devicetest"
)

// ask makes a request to the API and returns its status and body.
func (n *Node) ask(t testing.TB, token, method, path, body string, header ...string) (status int, text string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, n.Info.API+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(content)
}

// checkAs makes the OTA check of a client and returns the code that it has to speak, and the token that it got.
func checkAs(t testing.TB, ota, id, client, body string) (code, token string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ota, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Device-Id": {id}, "Content-Type": {"application/json"}, "User-Agent": {""}} // which the node would read a board from
	if client != "" {
		r.Header.Set("Client-Id", client)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	var reply struct {
		Activation *struct{ Code string }
		MQTT       *struct{ Password string }
		WebSocket  *struct{ Token string }
	}
	if err := json.NewDecoder(answer.Body).Decode(&reply); err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("OTA check as %q: %d, %v", client, answer.StatusCode, err)
	}
	if reply.Activation != nil {
		code = reply.Activation.Code
	}
	if reply.MQTT != nil {
		token = reply.MQTT.Password
	}
	if reply.WebSocket != nil {
		token += reply.WebSocket.Token
	}
	return code, token
}

// storedEvents reads the stored events until one of a kind was seen for a device.
func (n *Node) storedEvents(t testing.TB, token, device, kind string) (text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, n.Info.API+"/v1/events?device="+device, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Authorization": {"Bearer " + token}, "Last-Event-Id": {"0"}}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	buffer := make([]byte, 64<<10)
	for !regexp.MustCompile(`(?m)^event: ` + kind + `\n(.+\n)*\n`).MatchString(text) {
		length, err := answer.Body.Read(buffer)
		if text += string(buffer[:length]); err != nil {
			t.Fatalf("no event %s: %v in %s", kind, err, text)
		}
	}
	return text
}

// A key that may read everything of devices, but is not an administrator's, learns nothing with which the OTA check gives it
// the credentials of a device; nor does who reads the node's log.
func TestClientIDIsASecret(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--log-level", "debug")
	const joined, imported = "02:5e:c2:e7:00:01", "02:5e:c2:e7:00:02"
	clients := []string{clientOf(joined), clientOf(imported), "client-of-the-copy", "client-of-the-other-copy"}
	admin := node.Token(t)
	d := boot(t, node.Info.OTA, joined).dial(t, devicetest.NewScript())
	node.AwaitReady(t, 1)
	if status, text := node.ask(t, admin, "POST", "/v1/devices/import", "id,client_id\n"+imported+","+clients[1]+"\n", "Content-Type", "text/csv"); status != http.StatusOK {
		t.Fatal(status, text)
	}
	checkAs(t, node.Info.OTA, joined, clients[2], "{}")
	code, _ := checkAs(t, node.Info.OTA, imported, clients[3], "{}")
	if status, text := node.ask(t, admin, "POST", "/v1/devices/"+code+"/approve", ""); status != http.StatusOK {
		t.Fatal(status, text)
	}
	key, err := node.CreateKey(t.Context(), api.NewKey{Name: "reader", Scopes: []string{"devices:read", "events:read", "photos:read", "jobs:read"}})
	if err != nil {
		t.Fatal(err)
	}
	var learned strings.Builder
	for _, path := range []string{"/v1/devices", "/v1/devices?state=pending", "/v1/devices/" + joined, "/v1/devices/" + imported, "/v1/changes", "/v1/devices/" + joined + "/changes",
		"/v1/devices/" + imported + "/changes", "/v1/devices/export", "/v1/devices/export?format=ndjson", "/v1/devices/" + joined + "/recording", "/v1/devices/" + joined + "/explain",
		"/v1/refusals", "/v1/fleet", "/v1/self"} {
		status, text := node.ask(t, key.Token, "GET", path, "")
		if status != http.StatusOK {
			t.Errorf("%s: %d %s", path, status, text)
		}
		learned.WriteString(text)
	}
	for _, path := range []string{"/v1/devices/export?secrets=true", "/v1/devices/export?format=ndjson&secrets=true", "/v1/diagnosis?device=" + joined} {
		// security: D20
		if status, text := node.ask(t, key.Token, "GET", path, ""); status != http.StatusForbidden {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	learned.WriteString(node.storedEvents(t, key.Token, joined, "pending"))
	d.Close()
	learned.WriteString(node.storedEvents(t, key.Token, joined, "offline"))
	for _, client := range clients {
		// security: D20
		if strings.Contains(learned.String(), client) {
			t.Errorf("the answers contain %s", client)
		}
		if strings.Contains(node.Log.String(), client) {
			t.Errorf("the node's log contains %s", client)
		}
	}
	words := regexp.MustCompile(`[A-Za-z0-9][A-Za-z0-9:._@-]{3,127}`).FindAllString(learned.String(), -1)
	slices.Sort(words)
	for _, word := range slices.Compact(words) {
		for _, device := range []string{joined, imported} {
			// security: D20
			if _, token := checkAs(t, node.Info.OTA, device, word, "{}"); token != "" {
				t.Errorf("the OTA check gives the credentials of %s for %s", device, word)
			}
		}
	}
	// Administrators do see it, in one device and in an export, and nowhere else.
	for path, shown := range map[string]bool{"/v1/devices/" + joined: true, "/v1/devices/export?secrets=true": true, "/v1/devices/export": false, "/v1/devices": false, "/v1/changes": false} {
		if _, text := node.ask(t, admin, "GET", path, ""); strings.Contains(text, clients[0]) != shown {
			t.Errorf("%s: %s", path, text)
		}
	}
}

// A check changes what is known of a member only if it has the admitted Client-Id, and then only what it reports.
func TestChecksDoNotWipeFacts(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	const known, imported = "02:5e:c2:e7:00:03", "02:5e:c2:e7:00:04"
	const body = `{"chip_model_name":"esp32s3","application":{"version":"2.4.2","elf_sha256":"ab"},"board":{"name":"bread"}}`
	checkAs(t, node.Info.OTA, known, clientOf(known), body)
	is := func(board, firmware string) {
		t.Helper()
		node.AwaitStored(t)
		// security: D21
		if d, err := node.Device(t.Context(), known); err != nil || d.Board != board || d.Firmware != firmware {
			t.Errorf("board %q, firmware %q, %v", d.Board, d.Firmware, err)
		}
	}
	is("bread", "2.4.2")
	for _, client := range []string{clientOf(known), "another", ""} {
		checkAs(t, node.Info.OTA, known, client, `{}`)
	}
	is("bread", "2.4.2")
	for _, client := range []string{"another", ""} {
		checkAs(t, node.Info.OTA, known, client, strings.ReplaceAll(body, "bread", "copy"))
	}
	if status, text := node.ask(t, node.Token(t), "POST", "/v1/devices/import", "id\n"+imported+"\n", "Content-Type", "text/csv"); status != http.StatusOK {
		t.Fatal(status, text)
	}
	checkAs(t, node.Info.OTA, imported, "", strings.ReplaceAll(body, "bread", "stranger"))
	is("bread", "2.4.2")
	// security: D21
	if d, err := node.Device(t.Context(), imported); err != nil || d.Board != "" {
		t.Errorf("a check without Client-Id gave it the board %q, %v", d.Board, err)
	}
}

// A refused client is refused on all nodes and after a restart, while the device keeps its connection; an approval that
// names the client admits it.
func TestRefusedClient(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 41})
	a, b := c.Nodes[0], c.Nodes[1]
	const id, copied = "02:5e:c2:e7:00:05", "client-of-a-copy"
	device := boot(t, a.Info.OTA, id).dial(t, devicetest.NewScript())
	c.AwaitReady(t, 1, 20*time.Second)
	if code, token := checkAs(t, a.Info.OTA, id, copied, "{}"); code == "" || token != "" {
		t.Fatalf("the copy got code %q, token %q", code, token)
	}
	var waits api.PendingClient
	b.Await(t, "the other node shows the copy", 20*time.Second, func() bool {
		d, err := b.Device(t.Context(), id)
		if err == nil && len(d.Pending) == 1 {
			waits = d.Pending[0]
		}
		return waits.Client != "" && waits.Client != d.Client && d.Client != ""
	})
	if waits.Address != "127.0.0.1" || waits.Since.IsZero() {
		t.Errorf("the copy waits as %+v", waits)
	}
	if err := b.Approve(t.Context(), id, ""); err == nil || !strings.Contains(err.Error(), waits.Client) {
		t.Errorf("approved without a name: %v", err)
	}
	if stdout, stderr, status := b.Command(t, "devices", "refuse", id, waits.Client); status != 0 {
		t.Fatalf("%d %s%s", status, stdout, stderr)
	}
	refused := func(n *Node) bool {
		code, token := checkAs(t, n.Info.OTA, id, copied, "{}")
		// security: D22
		if token != "" {
			t.Errorf("a refused client got the token %s", token)
		}
		return code == ""
	}
	for _, n := range c.Nodes {
		n.Await(t, "the client is refused", 20*time.Second, func() bool { return refused(n) })
		if d, err := n.Device(t.Context(), id); err != nil || len(d.Pending) > 0 || d.State != "online" {
			t.Errorf("%+v, %v", d, err)
		}
	}
	a.Stop(t)
	a.Run(t)
	// security: D22
	if !refused(a) {
		t.Error("after a restart the client waits again")
	}
	device.Close()
	if stdout, stderr, status := a.Command(t, "devices", "approve", id, waits.Client); status != 0 {
		t.Fatalf("%d %s%s", status, stdout, stderr)
	}
	if _, token := checkAs(t, a.Info.OTA, id, copied, "{}"); token == "" {
		t.Error("the approved client gets no credentials")
	}
	// security: D22
	if _, token := checkAs(t, a.Info.OTA, id, clientOf(id), "{}"); token != "" {
		t.Error("the replaced client still gets credentials")
	}
}

// A device that is forgotten takes along what it answered in jobs and its device log, on all nodes.
func TestForgetDeletesAnswersAndLog(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 42})
	const id = "02:5e:c2:e7:00:06"
	for _, n := range []int{1, 0} { // both nodes have recorded it
		d := boot(t, c.Nodes[n].Info.OTA, id).dial(t, devicetest.NewScript())
		c.AwaitReady(t, 1, 20*time.Second)
		if n == 1 {
			d.Close()
			c.AwaitReady(t, 0, 20*time.Second)
		}
	}
	node := c.Nodes[0]
	admin := node.Token(t)
	_, text := node.ask(t, admin, "POST", "/v1/jobs", `{"action":{"call":{"tool":"`+volume+`","arguments":{"volume":9}}},"devices":["`+id+`"]}`)
	var job api.Job
	if err := json.Unmarshal([]byte(text), &job); err != nil || job.ID == "" {
		t.Fatalf("%s: %v", text, err)
	}
	answers := func() string {
		_, text := node.ask(t, admin, "GET", "/v1/jobs/"+job.ID+"/tasks", "")
		return text
	}
	node.Await(t, "the device has answered", 20*time.Second, func() bool { return strings.Contains(answers(), `"outcome":"ok"`) })
	if !strings.Contains(answers(), `"result":"true"`) {
		t.Fatalf("no answer is kept: %s", answers())
	}
	log := func(n *Node) string {
		_, text := n.ask(t, n.Token(t), "GET", "/v1/devices/"+id+"/recording", "")
		return text
	}
	for _, n := range c.Nodes {
		if !strings.Contains(log(n), `"address":"127.0.0.1"`) {
			t.Fatalf("its log has no address: %s", log(n))
		}
	}
	if err := node.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	// security: N36
	if text := answers(); strings.Contains(text, `"result":"true"`) || !strings.Contains(text, `"outcome":"ok"`) {
		t.Errorf("the tasks after it was forgotten: %s", text)
	}
	for _, n := range c.Nodes {
		// security: N36
		n.Await(t, "its log is deleted", 20*time.Second, func() bool { return !strings.Contains(log(n), "address") && !strings.Contains(log(n), volume) })
	}
}
