package fleet

// Held is how many devices the hub has an entry of.
func (s *Service) Held() int { return int(s.table.count.Load()) }
