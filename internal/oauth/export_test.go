package oauth

// HostsAsked returns how many hosts are remembered because they were asked for a document a moment ago.
func (s *Server) HostsAsked() int {
	s.documents.mu.Lock()
	defer s.documents.mu.Unlock()
	return len(s.documents.last)
}
